"""Let tests that were written for GPUs run on the CPU.

What is pretended, and nothing more: *every CUDA device is the CPU*.

- A device argument that means CUDA (`device=rank`, `.to(rank)`, `.cuda()`, `"cuda:1"`,
  `torch.device(rank)`) means the CPU. An integer where torch expects a device always means CUDA.
  `OnCpu`, a torch-function mode, rewrites them as they pass.
- The calls that set up or wait for a GPU (`torch.cuda.set_device`, `synchronize`, `manual_seed`,
  streams) do nothing, and the current device is number 0. Work on a CPU is complete when the call
  returns, so there is nothing to wait for.
- `torch.cuda.amp` casts and scales for the CPU; a CUDA device mesh is a CPU mesh; rank r has GPU r.

`torch.cuda.is_available()` stays False: the code under test must not be deceived, only the tests.
`device_ids` and `output_device`, which DDP rightly refuses for CPU modules, are taken off in
`swap.py`.

One size is changed too: `test_ddp_uneven_inputs` convolves an image of a megapixel about 100 times
a rank, at 10 to 20 s each on a CPU core. Its image is cut down; no assertion depends on the size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch.distributed import device_mesh
from torch.overrides import TorchFunctionMode

HUGE_IMAGE = (1, 1, 1000, 1000)
SMALL_IMAGE = (1, 1, 32, 32)


class OnCpu(TorchFunctionMode):
    """Rewrite CUDA devices to the CPU in the arguments of torch functions and tensor methods."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func in _TAKES_DEVICE_AT:
            args = _map_at(_TAKES_DEVICE_AT[func], args)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _to_cpu(kwargs["device"])}
        if func is torch.ones and args == HUGE_IMAGE:
            args = SMALL_IMAGE
        return func(*args, **kwargs)


# Where a device may stand among the positional arguments.
_TAKES_DEVICE_AT: dict[Callable[..., Any], int] = {
    torch.device: 0,
    torch._C._nn._parse_to: 0,  # what nn.Module.to reads its arguments with
    torch.Tensor.to: 1,
}


def _map_at(index: int, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(_to_cpu(arg) if at == index else arg for at, arg in enumerate(args))


def _to_cpu(device: Any) -> Any:
    return "cpu" if _means_cuda(device) else device


def _means_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


@contextmanager
def on_cpu(distributed_test: ModuleType) -> Iterator[None]:
    """Run the body of a test with every CUDA device being the CPU."""
    with ExitStack() as stack:
        for module, replaced in _replacements(distributed_test):
            stack.enter_context(mock.patch.multiple(module, **replaced))
        stack.enter_context(OnCpu())
        yield


def _replacements(distributed_test: ModuleType) -> list[tuple[ModuleType, dict[str, Any]]]:
    return [
        (
            torch.cuda,
            {
                "set_device": lambda _device: None,
                "synchronize": lambda device=None: None,
                "manual_seed": lambda _seed: None,
                "current_device": lambda: 0,
                "Stream": lambda _device: None,
                "stream": lambda _stream: nullcontext(),
            },
        ),
        (
            distributed_test,
            {
                "autocast": partial(torch.autocast, "cpu"),
                "GradScaler": partial(torch.amp.GradScaler, "cpu"),
                "init_multigpu_helper": lambda size, _backend: {r: [r] for r in range(size)},
            },
        ),
        (device_mesh, {"init_device_mesh": partial(_cpu_mesh, device_mesh.init_device_mesh)}),
    ]


def _cpu_mesh(init_device_mesh: Callable[..., Any], _device: str, *args: Any, **kw: Any) -> Any:
    return init_device_mesh("cpu", *args, **kw)
