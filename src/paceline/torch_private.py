"""Every name of torch that torch does not export, in one place, with what it does for us.

Pinned by the tests against torch 2.13. When a new torch moves one of them, this is the file to
change; nothing else in the package may reach into a private name. The lowest layer: imports only
torch.
"""

from __future__ import annotations

import datetime
import importlib
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch._utils import _get_device_index
from torch.autograd import Variable
from torch.distributed import rpc
from torch.distributed.distributed_c10d import _get_default_group, _rank_not_in_group
from torch.distributed.utils import _cast_forward_inputs, _sync_module_states, _to_kwargs
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _BufferCommHookLocation as BufferHookLocation
from torch.nn.parallel.distributed import _MixedPrecision as MixedPrecisionConfig

__all__ = [
    "BatchNormBase",
    "BufferHookLocation",
    "BuiltinHookType",
    "FutureBase",
    "MixedPrecisionConfig",
    "TorchDDP",
    "TorchGradBucket",
    "broadcast_coalesced",
    "cast_inputs",
    "collectives_started",
    "compiler_callback",
    "context_gradients",
    "current_context_id",
    "default_group",
    "device_index",
    "embedding_backward",
    "embedding_bag_backward",
    "embedding_bag_dense_backward",
    "embedding_bag_forward",
    "embedding_bag_weights_backward",
    "gloo_group",
    "group_timeout",
    "is_inside_backward",
    "is_outside_group",
    "is_profiled",
    "knows_sync_batch_norm",
    "move_inputs",
    "not_compiled",
    "not_compiled_itself",
    "optimizer_hook_handles",
    "preserve_versions",
    "queue_callback",
    "record_until_done",
    "storage_references",
    "sync_module",
    "will_run_node",
]

if not dist.is_initialized():
    # Its functions have the default group as default argument: None here, but the group, for ever,
    # once there is one. torch imports it in the first step (by way of torch._dynamo), and a group
    # that is referred to keeps its threads and sockets after ``destroy_process_group``.
    importlib.import_module("torch.distributed.nn.functional")

# TorchDDP is bound here, at import: torch's own tests put our class in the place of that name.

compiler_callback: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback
"""What torch.compile lets this thread call for every new frame; None while it is not at work."""

FutureBase: type = torch._C.Future
"""What hooks return: ``then()`` gives a base-class future."""

TorchGradBucket: type = dist.GradBucket  # type: ignore[attr-defined]
BuiltinHookType: Any = dist.BuiltinCommHookType  # type: ignore[attr-defined]


F = TypeVar("F", bound=Callable[..., Any])


def not_compiled(function: F) -> F:
    """Keep torch.compile out of a function, and out of what it calls."""
    wrapped: Any = torch._disable_dynamo(function)  # type: ignore[attr-defined]
    return cast(F, wrapped)


def not_compiled_itself(function: F) -> F:
    """Keep torch.compile out of a function, but not out of what it calls."""
    wrapped: Any = torch._disable_dynamo(function, recursive=False)  # type: ignore[attr-defined]
    return cast(F, wrapped)


def will_run_node(node: Any) -> bool:
    """Whether the running backward executes this node. Raises for a leaf that is captured."""
    return bool(torch._C._will_engine_execute_node(node))


def is_inside_backward() -> bool:
    """Whether this thread is running a backward pass."""
    return int(torch._C._current_graph_task_id()) != -1


def queue_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward that is running now has ended without an exception."""
    Variable._execution_engine.queue_callback(callback)


def storage_references(storage: torch.UntypedStorage) -> int:
    """How many tensors, and a constant, refer to this memory."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def tensor_exchange() -> Any:
    """The capsule with which C code asks DLPack where tensors lie; None if torch has none."""
    return getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)


def preserve_versions(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
    """Change tensors in place without autograd noticing."""
    context: AbstractContextManager[None] = torch.autograd._unsafe_preserve_version_counter(  # type: ignore[attr-defined]
        tuple(tensors)
    )
    return context


def collectives_started(group: dist.ProcessGroup) -> int:
    """How many collectives this rank has started on a group; 0 if the backend does not count."""
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except RuntimeError:
        return 0


def gloo_group(store: Any, rank: int, world: int, timeout: timedelta) -> dist.ProcessGroup:
    """Make a gloo group by hand: ``new_group`` needs a default group, which there may not be."""
    group = dist.ProcessGroup(store, rank, world)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    gloo = dist.ProcessGroupGloo(store, rank, world, timeout)
    group._register_backend(torch.device("cpu"), kind, gloo)
    return group


def is_profiled() -> bool:
    """Say whether a profiler is recording this thread."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def record_until_done(name: str) -> torch.futures.Future[None]:
    """Record an event for the profiler that ends, on whatever thread, with the returned future."""
    record = torch.autograd.profiler.record_function(name)
    future: torch.futures.Future[None] = torch.futures.Future()
    record.__enter__()
    record._call_end_callbacks_on_future(future)
    return future


def broadcast_coalesced(
    group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], chunk_bytes: int, source: int
) -> None:
    """Broadcast many tensors in few messages."""
    dist._broadcast_coalesced(group, list(tensors), chunk_bytes, source)  # type: ignore[attr-defined]


def sync_module(
    module: torch.nn.Module,
    group: dist.ProcessGroup,
    chunk_bytes: int,
    *,
    source: int,
    ignored: set[str],
    with_buffers: bool,
) -> None:
    """Broadcast a module's parameters, and its buffers if asked for."""
    _sync_module_states(
        module=module,
        process_group=group,
        broadcast_bucket_size=chunk_bytes,
        src=source,
        params_and_buffers_to_ignore=ignored,
        broadcast_buffers=with_buffers,
    )


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


def context_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """The gradients in a distributed autograd context: its own tensors, not copies.

    Empty if the context has ended: a step whose backward raised is completed after that, for the
    sake of the other ranks.
    """
    try:
        dist_autograd._is_valid_context(context_id)  # type: ignore[attr-defined]
    except RuntimeError:
        return {}
    return dict(dist_autograd.get_gradients(context_id))  # type: ignore[attr-defined]


def current_context_id() -> int | None:
    """The distributed autograd context that the caller is in.

    Valid in a forward only: the threads of a distributed backward are in no context.
    """
    if not rpc.is_available() or not rpc.api._is_current_rpc_agent_set():  # type: ignore[attr-defined]
        return None
    try:
        return int(dist_autograd._current_context()._context_id())  # type: ignore[attr-defined]
    except RuntimeError:
        return None


def optimizer_hook_handles(parameter: torch.Tensor) -> list[Any]:
    """The hooks with which ``_apply_optimizer_in_backward`` would step this parameter.

    Its module takes a second to import; whoever has used it has imported it.
    """
    module = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
    if module is None:
        return []
    return list(module.param_to_optim_hook_handle_map.get(parameter, []))


def group_timeout(group: dist.ProcessGroup) -> datetime.timedelta | None:
    """How long a group's collectives may take; None if its backend does not say."""
    devices = group._device_types
    own: datetime.timedelta | None = getattr(group, "_timeout", None)
    if own is not None:  # a group that is written in Python, ours for one
        return own
    try:
        options = group._get_backend(devices[0]).options
    except (IndexError, RuntimeError, AttributeError):
        return None
    timeout: datetime.timedelta | None = getattr(options, "_timeout", None)
    return timeout


def default_group() -> dist.ProcessGroup:
    """The group of ``init_process_group``."""
    return _get_default_group()


def is_outside_group(group: Any) -> bool:
    """Whether ``group`` is what ``new_group`` gives a rank that is not in it."""
    return bool(_rank_not_in_group(group))


def device_index(device: Any) -> int:
    """The index of a device given as number, string or torch.device."""
    return int(_get_device_index(device, True))


def knows_sync_batch_norm(device: torch.device) -> bool:
    """Whether torch's SyncBatchNorm has kernels for a device."""
    own: str = torch._C._get_privateuse1_backend_name()
    return device.type in ("cuda", "hpu", "xpu", own)


# The two halves of ``embedding_bag`` and ``embedding``, as autograd calls them. Parameter servers
# pool many tables by one call, and need the backward for each (``ps/pool.py``).
embedding_bag_forward = torch._embedding_bag
embedding_bag_backward = torch.ops.aten._embedding_bag_backward.default
embedding_bag_dense_backward = torch.ops.aten._embedding_bag_dense_backward.default
embedding_bag_weights_backward = torch.ops.aten._embedding_bag_per_sample_weights_backward.default
embedding_backward = torch.ops.aten.embedding_backward.default
