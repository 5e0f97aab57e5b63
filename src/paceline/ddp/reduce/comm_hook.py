"""Communication hooks: checked when they are registered, and run on a bucket.

Called by the wrapper and by launch.py. A hook may do anything, so all it does is checked here.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from paceline.buckets import Bucket, GradBucket
from paceline.errors import HookNotCallableError, HookSignatureError
from paceline.torch_private.groups import collectives_started
from paceline.torch_private.modules import FutureBase, TorchGradBucket
from paceline.types import CommHook

EXAMPLE = "def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]"


@dataclass(frozen=True)
class RegisteredHook:
    """A hook with its state."""

    hook: CommHook
    state: Any
    name: str
    group: dist.ProcessGroup

    def run(self, bucket: Bucket, *, is_last: bool) -> Any:
        """Start the hook on a bucket and return what it returns."""
        source = bucket.sparse_gradient if bucket.sparse else bucket.gradients
        assert source is not None
        return self.hook(self.state, GradBucket(bucket, source, is_last=is_last))

    def in_group(self, group: dist.ProcessGroup) -> RegisteredHook:
        """The same hook among other ranks. Its state is told, if it has ``change_group``."""
        state = self.state
        if isinstance(state, dist.ProcessGroup):
            state = group
        elif hasattr(state, "change_group"):
            state.change_group(group)
        elif getattr(state, "process_group", None) is not None:
            state.process_group = group
        return replace(self, state=state, group=group)

    def collectives_started(self) -> int:
        """How many collectives this rank has started on the group."""
        return collectives_started(self.group)


def check_future(future: Any, name: str) -> torch.futures.Future[torch.Tensor]:
    """Return what a hook gave, if it is a future.

    Raises:
        TypeError: If it is not one.
    """
    if not isinstance(future, FutureBase):
        raise TypeError(
            f"hook {name} returned {type(future).__name__} instead of a torch.futures.Future"
        )
    checked: torch.futures.Future[torch.Tensor] = future  # type: ignore[assignment]
    return checked


def hook_result(future: torch.futures.Future[Any], bucket: Bucket, name: str) -> torch.Tensor:
    """Return the tensor a finished hook gives, which must fill its bucket.

    Raises:
        TypeError: If the future holds anything else.
    """
    value = future.value()
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if not isinstance(value, torch.Tensor):
        held = f"{type(value).__name__} of {len(value)}" if isinstance(value, list) else None
        raise TypeError(
            f"hook {name}: its future holds {held or type(value).__name__}, not a tensor"
        )
    difference = _difference(value, bucket)
    if difference:
        raise TypeError(f"hook {name}: its future holds {difference} for bucket {bucket.index}")
    return value


def _difference(value: torch.Tensor, bucket: Bucket) -> str:
    """Say why a tensor cannot be a bucket's gradients; empty if it can. Precision may differ."""
    spec = bucket.spec
    if value.device.type != spec.device.type:
        return f"a tensor on {value.device} instead of {spec.device}"
    if (value.layout == torch.sparse_coo) != bucket.sparse:
        return f"a tensor with layout {value.layout}"
    is_number = value.is_floating_point() or value.is_complex()
    if not is_number or value.is_complex() != spec.dtype.is_complex:
        return f"{value.dtype} instead of {spec.dtype}"
    if not bucket.sparse and value.numel() != spec.numel:
        return f"{value.numel()} elements instead of {spec.numel}"
    if bucket.sparse and tuple(value.shape) != tuple(bucket.slots[0].spec.shape):
        return f"shape {list(value.shape)} instead of {list(bucket.slots[0].spec.shape)}"
    return ""


def check_hook(hook: Any) -> str:
    """Check that a hook can be called with ``(state, bucket)``; return its name.

    Raises:
        HookNotCallableError: If it is no function.
        HookSignatureError: If it takes or promises something else.
    """
    if not callable(hook):
        raise HookNotCallableError(
            f"Communication hook must be callable. {hook!r} is a {type(hook).__name__}. "
            f"Write {EXAMPLE}."
        )
    name = getattr(hook, "__qualname__", type(hook).__qualname__)
    signature = inspect.signature(hook)
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise HookSignatureError(
            f"The communication hook {name}{signature} cannot be called as hook(state, bucket): "
            f"{error}. Write {EXAMPLE}."
        ) from None
    _check_annotations(name, signature)
    return name


def _check_annotations(name: str, signature: inspect.Signature) -> None:
    empty = inspect.Signature.empty
    bucket = list(signature.parameters.values())[-1]
    for parameter in signature.parameters.values():
        if parameter.name == "bucket":
            bucket = parameter
    said = bucket.annotation
    if isinstance(said, str):
        takes_bucket = said.rpartition(".")[2] in ("GradBucket", "Any", "object")
    else:
        takes_bucket = said in (empty, TorchGradBucket, GradBucket, Any, object)
    if bucket.kind is not inspect.Parameter.VAR_POSITIONAL and not takes_bucket:
        raise HookSignatureError(
            f"Communication hook {name}: bucket annotation should be dist.GradBucket, but it is "
            f"{bucket.annotation!r}. Write {EXAMPLE}."
        )
    returns = signature.return_annotation
    if isinstance(returns, str):
        fits = "Future" in returns or returns.rpartition(".")[2] in ("Any", "object")
    else:
        fits = returns in (
            empty,
            Any,
            object,
            torch.futures.Future,
            torch.futures.Future[torch.Tensor],
        )
    if not fits:
        raise HookSignatureError(
            f"Communication hook {name}: return annotation should be "
            f"torch.futures.Future[torch.Tensor], but it is {returns!r}. Write {EXAMPLE}."
        )


def _allreduce(group: dist.ProcessGroup, buffer: torch.Tensor) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = group.allreduce([buffer]).get_future()
    return future


def builtin_allreduce(group: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook behind ``BuiltinCommHookType.ALLREDUCE``; its state is the group."""
    buffer = bucket.buffer().div_(group.size())
    return _allreduce(group, buffer).then(lambda done: done.value()[0])


def builtin_fp16(group: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook behind ``BuiltinCommHookType.FP16_COMPRESS``; its state is the group."""
    buffer = bucket.buffer()
    half = buffer.to(torch.float16).div_(group.size())
    return _allreduce(group, half).then(lambda done: buffer.copy_(done.value()[0]))
