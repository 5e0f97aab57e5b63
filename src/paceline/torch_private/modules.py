"""Modules and wrappers of torch.nn: its DDP, join context, inputs, batch norm and embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as _pytree
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.modules.batchnorm import SyncBatchNorm as TorchSyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _BufferCommHookLocation as BufferHookLocation
from torch.nn.parallel.distributed import _MixedPrecision as MixedPrecisionConfig

from paceline.torch_private.names import find

_get_device_index = find("torch._utils._get_device_index")
_to_kwargs = find("torch.distributed.utils._to_kwargs")
_cast_forward_inputs = find("torch.distributed.utils._cast_forward_inputs")
_own_backend_name = find("torch._C._get_privateuse1_backend_name")

# TorchDDP and TorchSyncBatchNorm are bound here, at import: patch_torch and torch's own tests put
# our classes in the place of those names.
__all__ = [
    "FIRST_BUCKET_BYTES",
    "BatchNormBase",
    "BufferHookLocation",
    "BuiltinHookType",
    "FutureBase",
    "JoinByMessages",
    "MixedPrecisionConfig",
    "TorchDDP",
    "TorchGradBucket",
    "TorchSyncBatchNorm",
    "cast_inputs",
    "device_index",
    "embedding_backward",
    "embedding_bag_backward",
    "embedding_bag_dense_backward",
    "embedding_bag_forward",
    "embedding_bag_weights_backward",
    "knows_sync_batch_norm",
    "move_inputs",
    "own_buffers",
    "rebuild_registered",
    "registered_contents",
    "replicate_as_torch",
    "replicates_itself",
]


FutureBase: type = torch._C.Future
"""What hooks return: ``then()`` gives a base-class future."""

FIRST_BUCKET_BYTES: int = dist._DEFAULT_FIRST_BUCKET_BYTES  # type: ignore[attr-defined]
"""Dynamo's graphs of a wrapped module may not be smaller."""

TorchGradBucket: type = dist.GradBucket  # type: ignore[attr-defined]
BuiltinHookType: Any = dist.BuiltinCommHookType  # type: ignore[attr-defined]


class JoinByMessages(Join):
    """torch's join context; what a joined rank waits for first goes through ``reduce``.

    Args:
        joinables: As torch's.
        reduce: Sums a tensor over all ranks, in place.
        enable: As torch's.
        throw_on_early_termination: As torch's.
        kwargs: As torch's.
    """

    def __init__(
        self,
        joinables: list[Joinable],
        reduce: Callable[[torch.Tensor], None],
        enable: bool,
        throw_on_early_termination: bool,
        **kwargs: Any,
    ) -> None:
        self._reduce = reduce
        super().__init__(joinables, enable, throw_on_early_termination, **kwargs)

    def _get_num_nonjoined_procs(self) -> float:
        count = torch.zeros(1, device=self._device)
        self._reduce(count)
        return count.item()


def move_inputs(
    inputs: tuple[Any, ...], kwargs: dict[str, Any], target: torch.device, side_stream: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Move the tensors among a forward's arguments to a device."""
    moved, moved_kwargs = _to_kwargs(inputs, kwargs, target, side_stream)
    return moved[0], moved_kwargs[0]


def cast_inputs(
    dtype: torch.dtype, inputs: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast the floating-point tensors among a forward's arguments."""
    result: tuple[tuple[Any, ...], dict[str, Any]] = _cast_forward_inputs(dtype, *inputs, **kwargs)
    return result


def device_index(device: Any) -> int:
    """The index of a device given as number, string or torch.device."""
    return int(_get_device_index(device, True))


def own_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """A module's own buffers, in the dict where it looks them up: attributes take 10 times as long.

    A scripted module has no such dict, and cannot replace a buffer.
    """
    found: dict[str, torch.Tensor | None] | None = vars(module).get("_buffers")
    return dict(module.named_buffers(recurse=False)) if found is None else found


def replicates_itself(kind: type[torch.nn.Module]) -> bool:
    """Whether a class of modules has its own way of being copied by ``DataParallel``."""
    own: Any = kind._replicate_for_data_parallel
    return own is not torch.nn.Module._replicate_for_data_parallel


def replicate_as_torch(module: torch.nn.Module) -> torch.nn.Module:
    """Copy a module as torch's ``DataParallel`` does, or as its class does it."""
    replica: torch.nn.Module = module._replicate_for_data_parallel()
    return replica


def knows_sync_batch_norm(device: torch.device) -> bool:
    """Whether torch's SyncBatchNorm has kernels for a device."""
    own: str = _own_backend_name()
    return device.type in ("cuda", "hpu", "xpu", own)


# The two halves of ``embedding_bag`` and ``embedding``, as autograd calls them. Parameter servers
# pool many tables by one call, and need the backward for each (``ps/client/bag_pooling.py``).
embedding_bag_forward = find("torch._embedding_bag")
embedding_bag_backward = torch.ops.aten._embedding_bag_backward.default
embedding_bag_dense_backward = torch.ops.aten._embedding_bag_dense_backward.default
embedding_bag_weights_backward = torch.ops.aten._embedding_bag_per_sample_weights_backward.default
embedding_backward = torch.ops.aten.embedding_backward.default


def registered_contents(value: Any) -> list[Any]:
    """Return what a type holds that its author has registered with torch's pytrees."""
    node = _pytree.SUPPORTED_NODES.get(type(value))
    return list(node.flatten_fn(value)[0]) if node is not None else []


def rebuild_registered(like: Any, parts: list[Any]) -> Any:
    """Build such a type anew, with other contents."""
    node = _pytree.SUPPORTED_NODES[type(like)]
    return node.unflatten_fn(parts, node.flatten_fn(like)[1])
