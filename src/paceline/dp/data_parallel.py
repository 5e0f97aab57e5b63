"""``DataParallel``: one process, one module, a batch cut over several devices.

A shell around scatter, replicate, parallel_apply and gather, which users may override one by one,
as in torch. Devices may be accelerators or CPU entries; all go the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar
from warnings import warn

import torch
from torch import nn
from torch.autograd.profiler import record_function

# Bound at import: tests put our class in the place of torch's name.
from torch.nn import DataParallel as TorchDataParallel

from paceline.dp.devices import (
    DeviceLike,
    accelerator_type,
    all_accelerators,
    parse_device,
    parse_devices,
    torch_id,
)
from paceline.dp.parallel_apply import parallel_apply
from paceline.dp.replicate import adopt_buffers, replicate, walk
from paceline.dp.scatter_gather import gather, scatter_kwargs
from paceline.errors import PlacementError, SharedWriteError
from paceline.torch_private.compile import not_compiled

M = TypeVar("M", bound=nn.Module)


class DataParallel(TorchDataParallel[M]):
    """Run one module on several devices of this process, each on its part of the batch.

    Outputs, gradients and buffers are those of the plain module. Takes torch's arguments; what
    torch cannot do is ``device_ids=["cpu", "cpu"]``: replicas on threads, which share the module's
    memory and divide the intra-op threads. They are there to develop, debug and test on a machine
    without accelerators. See ``docs/data-parallel.md``.

    Args:
        module: Its parameters and buffers must be on the first device.
        device_ids: Numbers of accelerators, devices, or ``"cpu"``. None: all accelerators; without
            one, or with an empty list, the module runs as it is.
        output_device: Where outputs are put together; the first device by default.
        dim: The dimension that inputs are cut, and outputs are put together, along.

    Example::

        model = paceline.DataParallel(Net(), device_ids=["cpu", "cpu"])
        loss(model(x), y).backward()  # gradients are in Net's parameters
    """

    def __init__(
        self,
        module: M,
        device_ids: Sequence[DeviceLike] | None = None,
        output_device: DeviceLike | None = None,
        dim: int = 0,
    ) -> None:
        # Not super().__init__(): torch's knows no CPU. A subclass, so that isinstance holds.
        nn.Module.__init__(self)
        self.module = module
        self.dim = dim
        devices = _choose_devices(device_ids)
        self.device_ids: list[Any] = [torch_id(device) for device in devices]
        if not devices:
            return
        self.src_device_obj = devices[0]
        target = devices[0] if output_device is None else parse_device(output_device)
        self.output_device: Any = torch_id(target)
        if len(devices) == 1:
            self.module.to(self.src_device_obj)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on all devices; on the caller's thread if there is only one piece."""
        # The decorator alone would import the compiler (1 s) for everybody.
        if torch.compiler.is_compiling():
            return self._forward_uncompiled(*inputs, **kwargs)
        return self._forward(*inputs, **kwargs)

    def _forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with record_function("DataParallel.forward"):
            if not self.device_ids:
                return self.module(*inputs, **kwargs)
            _check_placement(self.module, self.src_device_obj)
            args, kwds = self.scatter(inputs, kwargs, self.device_ids)
            args, kwds = _at_least_one(args, kwds)
            if len(self.device_ids) == 1:
                return self.module(*args[0], **kwds[0])
            replicas = self.replicate(self.module, self.device_ids[: len(args)])
            with _Watched(self.module, replicas, parse_devices(self.device_ids[: len(args)])):
                outputs = self.parallel_apply(replicas, args, kwds)
            return self.gather(outputs, self.output_device)

    _forward_uncompiled = not_compiled(_forward)

    def replicate(self, module: M, device_ids: Sequence[DeviceLike]) -> list[M]:
        """Make the replicas of one forward."""
        return replicate(module, device_ids, not torch.is_grad_enabled())

    def scatter(
        self,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        device_ids: Sequence[DeviceLike],
    ) -> Any:
        """Cut the inputs of one forward."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def parallel_apply(
        self, replicas: Sequence[M], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        """Run the replicas."""
        return parallel_apply(replicas, inputs, kwargs, self.device_ids[: len(replicas)])

    def gather(self, outputs: Any, output_device: DeviceLike) -> Any:
        """Put the outputs of one forward together."""
        return gather(outputs, output_device, dim=self.dim)


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[DeviceLike] | None = None,
    output_device: DeviceLike | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Run a module once, its inputs cut over several devices: :class:`DataParallel` as a function.

    Args:
        module: Its parameters and buffers must be on the first device.
        inputs: One input, or a tuple of positional arguments, or None.
        device_ids: As for :class:`DataParallel`.
        output_device: As for :class:`DataParallel`.
        dim: As for :class:`DataParallel`.
        module_kwargs: Keyword arguments.

    Raises:
        PlacementError: If there is no device to run on, or the module is not on the first one.
    """
    devices = all_accelerators() if device_ids is None else parse_devices(device_ids)
    if not devices:
        raise PlacementError(
            "device type could not be determined, no available devices were found: device_ids is "
            "empty, or is None on a machine without accelerators. For replicas on CPU threads, "
            'write device_ids=["cpu", "cpu"].'
        )
    if not isinstance(inputs, tuple):
        inputs = () if inputs is None else (inputs,)
    _check_placement(module, devices[0])
    args, kwds = _at_least_one(*scatter_kwargs(inputs, module_kwargs, devices, dim))
    if len(devices) == 1:
        return module(*args[0], **kwds[0])
    used = devices[: len(args)]
    replicas = replicate(module, used, not torch.is_grad_enabled())
    with _Watched(module, replicas, used):
        outputs = parallel_apply(replicas, args, kwds, used)
    return gather(outputs, devices[0] if output_device is None else output_device, dim)


def _choose_devices(device_ids: Sequence[DeviceLike] | None) -> list[torch.device]:
    if device_ids is None:
        return all_accelerators()
    if accelerator_type() is None and any(isinstance(d, int) for d in device_ids):
        warn(
            f"device_ids={list(device_ids)} are accelerators, and this machine has none: the "
            "module runs as it is, not in parallel. For replicas on CPU threads, write "
            'device_ids=["cpu", "cpu"].',
            UserWarning,
            stacklevel=3,
        )
        return []
    return parse_devices(device_ids)


def _at_least_one(
    args: Sequence[Any], kwargs: Sequence[Any]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """A forward without any input runs once."""
    return (args, kwargs) if args or kwargs else (((),), ({},))


def _check_placement(module: nn.Module, device: torch.device) -> None:
    for name, tensor in _tensors_of(module):
        if tensor.device != device:
            raise PlacementError(
                f"module must have its parameters and buffers on device {device} (device_ids[0]) "
                f"but found one of them on device: {tensor.device}. It is {name}. Call "
                f"module.to({str(device)!r}), or put the module's device first.",
                parameters=[name],
            )


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, part in walk(module):
        for table in (part._parameters, part._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    yield f"{prefix}.{key}" if prefix else key, tensor


class _Watched:
    """While replicas run: adopts their buffers, and sees writes to the memory that they share."""

    def __init__(
        self, module: nn.Module, replicas: Sequence[nn.Module], devices: Sequence[torch.device]
    ) -> None:
        self._module = module
        self._replicas = replicas
        self._is_shared = list(devices).count(devices[0]) > 1

    def __enter__(self) -> None:
        self._before = self._versions() if self._is_shared else {}

    def __exit__(self, kind: Any, _error: object, _trace: object) -> None:
        # Buffers too when a replica has failed: the plain module would keep what it wrote.
        adopt_buffers(self._module, self._replicas[0])
        if kind is None and self._is_shared and self._versions() != self._before:
            raise self._shared_write()

    def _versions(self) -> dict[int, int]:
        """How often each parameter has been written to, by identity."""
        return {
            id(parameter): parameter._version
            for _, part in walk(self._module)
            for parameter in part._parameters.values()
            if parameter is not None and not parameter.is_inference()
        }

    def _shared_write(self) -> SharedWriteError:
        after = self._versions()
        changed = [
            name
            for name, parameter in self._module.named_parameters()
            if after.get(id(parameter)) != self._before.get(id(parameter))
        ]
        return SharedWriteError(
            f"A forward wrote to parameters: {', '.join(changed)}. Replicas on one device share "
            "their memory, so they wrote to it at the same time. Change parameters outside of "
            "forward, or keep what forward changes in a buffer: each replica has its own, and the "
            "first one's is kept.",
            parameters=changed,
        )
