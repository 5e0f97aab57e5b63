"""The types of the constructor's arguments: each wrong one has an error that names it.

Called by the wrapper before anything else. What the values must be is in
:mod:`paceline.ddp.arguments`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from paceline.errors import ArgumentTypeError

FLAGS = (
    "init_sync",
    "find_unused_parameters",
    "check_reduction",
    "gradient_as_bucket_view",
    "static_graph",
    "skip_all_reduce_unused_params",
    "batched_grad_copy",
    "broadcast_buffers",
    "forward_sync_buffers",
    "lazy_bucket_allocation",
)
"""Arguments that are true or false; None is false, as in torch, or the default."""


def check_types(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of the constructor that are of a wrong type.

    Raises:
        ArgumentTypeError: With the argument, what was given, and what to write.
    """
    _check_module(arguments["module"])
    for name in FLAGS:
        value = arguments[name]
        if value is not None and not _is_flag(value):
            raise _wrong(name, value, "True or False", f"{name}=True")
    _check_sizes(arguments["bucket_cap_mb"], arguments["bucket_cap_mb_list"])
    interval = arguments["check_every"]
    if interval is not None and (not isinstance(interval, int) or isinstance(interval, bool)):
        raise _wrong("check_every", interval, "None or a number of steps", "check_every=100")
    device_ids = arguments["device_ids"]
    if device_ids is not None and not _is_list(device_ids):
        raise _wrong("device_ids", device_ids, "None or a list of one device", "device_ids=[0]")
    precision = arguments["mixed_precision"]
    if precision is not None and not hasattr(precision, "reduce_dtype"):
        example = "mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16)"
        raise _wrong("mixed_precision", precision, "None or a _MixedPrecision", example)
    mesh = arguments["device_mesh"]
    if mesh is not None and arguments["process_group"] is None and not hasattr(mesh, "get_group"):
        example = "device_mesh=init_device_mesh('cpu', (2,))"
        raise _wrong("device_mesh", mesh, "None or a 1-D DeviceMesh", example)
    _check_delayed(
        arguments["delay_all_reduce_named_params"], arguments["param_to_hook_all_reduce"]
    )


def _check_module(module: Any) -> None:
    if isinstance(module, torch.nn.Module):
        return
    hint = " (the class, not an object of it)" if isinstance(module, type) else ""
    raise _wrong(f"module{hint}", module, "a torch.nn.Module", "DistributedDataParallel(Net())")


def _check_sizes(cap: Any, caps: Any) -> None:
    if cap is not None and not _is_number(cap):
        raise _wrong("bucket_cap_mb", cap, "a number of mebibytes", "bucket_cap_mb=25")
    if caps is not None and not (_is_list(caps) and all(map(_is_number, caps))):
        example = "bucket_cap_mb_list=[1, 25]"
        raise _wrong("bucket_cap_mb_list", caps, "a list of numbers of mebibytes", example)


def _check_delayed(delayed: Any, trigger: Any) -> None:
    name = "delay_all_reduce_named_params"
    is_wrong = _is_list(delayed) and not all(map(_is_named, delayed))
    if delayed is not None and (is_wrong or not _is_iterable(delayed)):
        example = f"{name}=list(module.part.named_parameters(prefix='part'))"
        raise _wrong(name, delayed, "pairs of a name and a parameter", example)
    if trigger is not None and not isinstance(trigger, torch.Tensor):
        example = "param_to_hook_all_reduce=module.first.weight"
        raise _wrong("param_to_hook_all_reduce", trigger, "a parameter of the module", example)


def _is_flag(value: Any) -> bool:
    # numpy's bool has no common base with Python's.
    return isinstance(value, int) or type(value).__name__ == "bool_"


def _is_number(value: Any) -> bool:
    return hasattr(value, "__float__") and not isinstance(value, (str, bytes))


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _is_iterable(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))


def _is_named(entry: Any) -> bool:
    return (
        isinstance(entry, (tuple, list))
        and len(entry) == 2
        and isinstance(entry[0], str)
        and isinstance(entry[1], torch.Tensor)
    )


def _wrong(name: str, value: Any, expected: str, example: str) -> ArgumentTypeError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return ArgumentTypeError(
        f"{name} of DistributedDataParallel is {expected}, not {shown} "
        f"({type(value).__name__}). Write for example {example}."
    )
