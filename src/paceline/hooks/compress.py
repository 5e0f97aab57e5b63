"""Gradients in 16 bits: half the bytes, one cast each way.

``fp16_compress_hook`` and ``bf16_compress_hook`` sum in 16 bits; the wrappers give any other hook a
bucket in 16 bits. float16 has 11 bits of precision and ends at 65504 (what is above becomes
infinite); bfloat16 has 8 bits and the range of float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import HookResultError
from paceline.hooks.interface import (
    HookBucket,
    TensorFuture,
    after,
    check_gradients,
    comm_hook,
    group_of,
    start_all_reduce,
)
from paceline.torch_private.modules import FutureBase

Hook = Callable[[Any, HookBucket], TensorFuture]


@comm_hook
def fp16_compress_hook(process_group: dist.ProcessGroup | None, bucket: HookBucket) -> TensorFuture:
    """Take the mean in float16."""
    return _compressed_mean("fp16_compress_hook", torch.float16, process_group, bucket)


# torch's DDP refuses hooks of the name bf16_compress_hook unless there is a GPU. gloo can sum
# bfloat16, so this function goes by another __name__, and works on both wrappers.
@comm_hook
def _bf16_on_any_device(
    process_group: dist.ProcessGroup | None, bucket: HookBucket
) -> TensorFuture:
    """Take the mean in bfloat16."""
    return _compressed_mean("bf16_compress_hook", torch.bfloat16, process_group, bucket)


bf16_compress_hook = _bf16_on_any_device


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Return a hook that hands ``hook`` the gradients in float16, and casts its result back."""
    return _wrapped(hook, torch.float16)


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Return a hook that hands ``hook`` the gradients in bfloat16, and casts its result back."""
    return _wrapped(hook, torch.bfloat16)


def _compressed_mean(
    name: str, dtype: torch.dtype, process_group: dist.ProcessGroup | None, bucket: HookBucket
) -> TensorFuture:
    buffer = check_gradients(name, bucket)
    flat = torch.view_as_real(buffer) if buffer.is_complex() else buffer
    group = group_of(process_group)
    short = flat.to(dtype).div_(group.size())

    def restore() -> torch.Tensor:
        flat.copy_(short)
        return buffer

    return after(start_all_reduce(short, group), restore)


def _wrapped(hook: Hook, dtype: torch.dtype) -> Hook:
    @comm_hook
    def cast_and_call(state: Any, bucket: HookBucket) -> TensorFuture:
        buffer = check_gradients(f"{dtype} around a hook", bucket, allow_complex=False)
        bucket.set_buffer(buffer.to(dtype))
        return _checked(hook(state, bucket), name).then(lambda ended: buffer.copy_(ended.value()))

    name = getattr(hook, "__qualname__", str(hook))
    cast_and_call.__qualname__ = f"{name} in {dtype}"
    return cast_and_call


def _checked(future: Any, name: str) -> TensorFuture:
    if not isinstance(future, FutureBase):
        raise HookResultError(
            f"hook {name} returned {type(future).__name__} instead of a torch.futures.Future that "
            "holds the bucket's result"
        )
    checked: TensorFuture = future  # type: ignore[assignment]
    return checked
