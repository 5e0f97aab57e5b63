"""Every name of torch that torch does not export, in one place, with what it does for us.

Pinned by the tests against torch 2.13. When a new torch moves one of them, this is the file to
change; nothing else in the package may reach into a private name. The lowest layer: imports only
torch.
"""

from __future__ import annotations

import datetime
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from types import CodeType, FrameType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch._utils import _get_device_index
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.distributed import distributed_c10d, rpc
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.distributed_c10d import _get_default_group, _rank_not_in_group
from torch.distributed.utils import _cast_forward_inputs, _to_kwargs
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _BufferCommHookLocation as BufferHookLocation
from torch.nn.parallel.distributed import _MixedPrecision as MixedPrecisionConfig
from torch.nn.utils.stateless import _functional_call

__all__ = [
    "C10D_FILE",
    "BatchNormBase",
    "BufferHookLocation",
    "BuiltinHookType",
    "FutureBase",
    "JoinByMessages",
    "MixedPrecisionConfig",
    "TorchDDP",
    "TorchGradBucket",
    "attach_cpu_backend",
    "backward_id",
    "cast_inputs",
    "collectives_of_all_groups",
    "collectives_started",
    "compiler_callback",
    "context_gradients",
    "copy_all",
    "current_context_id",
    "default_group",
    "default_group_or_none",
    "device_index",
    "embedding_backward",
    "embedding_bag_backward",
    "embedding_bag_dense_backward",
    "embedding_bag_forward",
    "embedding_bag_weights_backward",
    "enclosing_backward_node",
    "gloo_group",
    "group_named",
    "group_store",
    "group_timeout",
    "is_inside_backward",
    "is_inside_functional_call",
    "is_inside_transform",
    "is_outside_group",
    "is_profiled",
    "knows_sync_batch_norm",
    "move_inputs",
    "never_compiled",
    "not_compiled",
    "not_compiled_itself",
    "optimizer_hook_handles",
    "preserve_versions",
    "queue_callback",
    "record_inputs",
    "record_until_done",
    "registered_name",
    "replace_flight_dumps",
    "storage_references",
    "will_run_node",
]

if not dist.is_initialized():
    # Its functions have the default group as default argument: None here, but the group, for ever,
    # once there is one. torch imports it in the first step (by way of torch._dynamo), and a group
    # that is referred to keeps its threads and sockets after ``destroy_process_group``.
    importlib.import_module("torch.distributed.nn.functional")

# TorchDDP is bound here, at import: torch's own tests put our class in the place of that name.

C10D_FILE: str = distributed_c10d.__file__
"""Where the functions of ``torch.distributed`` are: frames are compared with it."""

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


def never_compiled(function: F) -> F:
    """Keep torch.compile out of what autograd calls, of what that calls, and of functions inside.

    For hooks: a step that is compiled as a whole runs its backward, and them, under the compiler's
    eyes. Costs nothing, also no import of the compiler, which :func:`not_compiled` begins with.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        frames.set_code_exec_strategy(code, skip)
        codes += [inside for inside in code.co_consts if isinstance(inside, CodeType)]
    return function


def will_run_node(node: Any) -> bool:
    """Whether the running backward executes this node. Raises for a leaf that is captured."""
    return bool(torch._C._will_engine_execute_node(node))


backward_id: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward pass that this thread is running; -1 outside of any."""


def is_inside_backward() -> bool:
    """Whether this thread is running a backward pass."""
    return int(torch._C._current_graph_task_id()) != -1


def is_inside_functional_call() -> bool:
    """Whether a caller runs a module with tensors that are lent to it for this call.

    Nothing else tells: an ``nn.Parameter`` may be lent, too. Takes about 2 us.
    """
    lends = _functional_call.__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is lends:
            return True
        frame = frame.f_back
    return False


def is_inside_transform() -> bool:
    """Whether this runs under torch.func.grad, vmap, or another transform of functions."""
    return torch._C._functorch.peek_interpreter_stack() is not None


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


def queue_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward that is running now has ended without an exception."""
    Variable._execution_engine.queue_callback(callback)


_PYTHON_BACKWARDS = {BackwardCFunction.apply.__code__, BackwardCFunction.apply_boxed.__code__}


def enclosing_backward_node() -> Any:
    """The node, of the outermost backward, that runs this backward inside of it; None if none.

    Such a node is a ``torch.autograd.Function`` whose backward calls ``backward()`` again. The
    engine does not say; the stack of this thread does.
    """
    frame: FrameType | None = sys._getframe(1)
    found = None
    while frame is not None:
        if frame.f_code in _PYTHON_BACKWARDS:
            found = frame.f_locals["self"]
        frame = frame.f_back
    return found


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


def collectives_of_all_groups() -> int:
    """How many collectives this rank has started on all groups that there are."""
    return sum(map(collectives_started, dist.distributed_c10d._world.pg_map))


def gloo_group(store: Any, gloo: dist.ProcessGroupGloo) -> dist.ProcessGroup:
    """Make a group by hand: ``new_group`` needs a default group, which there may not be."""
    group = dist.ProcessGroup(store, gloo.rank(), gloo.size())
    _attach(group, dist.ProcessGroup.BackendType.GLOO, gloo)
    return group


def gloo_options(timeout: datetime.timedelta, threads: int) -> Any:
    """What a gloo group is made with, if not only with a time-out."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    # As torch does where it is given a time-out only.
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options._devices = [gloo.create_device(interface=name) for name in interfaces] or [
        gloo.create_default_device()
    ]
    options._timeout = timeout
    options._threads = threads
    return options


def attach_cpu_backend(group: dist.ProcessGroup, backend: dist.ProcessGroupGloo) -> None:
    """Let ``group._get_backend(torch.device("cpu"))`` return a backend, for a group in Python."""
    _attach(group, dist.ProcessGroup.BackendType.CUSTOM, backend)


def _attach(group: dist.ProcessGroup, kind: Any, backend: dist.ProcessGroupGloo) -> None:
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, backend)


def replace_flight_dumps(as_pickle: Callable[..., bytes], as_json: Callable[..., bytes]) -> None:
    """Let both dumps of the flight recorder go through a function before they are returned."""
    c10d: Any = torch._C._distributed_c10d
    dump_pickle, dump_json = c10d._dump_fr_trace, c10d._dump_fr_trace_json

    @functools.wraps(dump_pickle)
    def _dump_fr_trace(
        includeCollectives: bool | None = None,
        includeStackTraces: bool | None = None,
        onlyActive: bool | None = None,
    ) -> bytes:
        dump: bytes = dump_pickle(includeCollectives, includeStackTraces, onlyActive)
        if includeCollectives is False:
            return dump
        with_frames = includeStackTraces is not False
        return as_pickle(dump, only_active=bool(onlyActive), with_frames=with_frames)

    @functools.wraps(dump_json)
    def _dump_fr_trace_json(
        includeCollectives: bool | None = None, onlyActive: bool | None = None
    ) -> bytes:
        dump: bytes = dump_json(includeCollectives, onlyActive)
        if includeCollectives is False:
            return dump
        return as_json(dump, only_active=bool(onlyActive), with_frames=False)

    c10d._dump_fr_trace, c10d._dump_fr_trace_json = _dump_fr_trace, _dump_fr_trace_json


def is_profiled() -> bool:
    """Say whether a profiler is recording this thread."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def record_inputs(name: str, tensors: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
    """Record an event for the profiler, with the shapes of tensors."""
    event: AbstractContextManager[None] = torch._C._profiler._RecordFunctionFast(
        name, list(tensors)
    )
    return event


def record_until_done(name: str) -> torch.futures.Future[None]:
    """Record an event for the profiler that ends, on whatever thread, with the returned future."""
    record = torch.autograd.profiler.record_function(name)
    future: torch.futures.Future[None] = torch.futures.Future()
    record.__enter__()
    record._call_end_callbacks_on_future(future)
    return future


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy tensor by tensor, in one call."""
    torch._foreach_copy_(list(targets), list(sources))


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


def group_store(group: dist.ProcessGroup) -> Any:
    """The store that a group was made with."""
    return group.get_group_store()


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


def default_group_or_none() -> dist.ProcessGroup | None:
    """The group of ``init_process_group``, if there is one."""
    return dist.group.WORLD if dist.is_initialized() else None


def registered_name(group: dist.ProcessGroup) -> str | None:
    """The name under which all ranks know a group; None once it is destroyed."""
    return distributed_c10d._world.pg_names.get(group)


def group_named(name: str) -> dist.ProcessGroup | None:
    """The group of that name, if this process has one."""
    found = distributed_c10d._world.pg_names.items()
    return next((group for group, known in list(found) if known == name), None)


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
# pool many tables by one call, and need the backward for each (``ps/client/bag_pooling.py``).
embedding_bag_forward = torch._embedding_bag
embedding_bag_backward = torch.ops.aten._embedding_bag_backward.default
embedding_bag_dense_backward = torch.ops.aten._embedding_bag_dense_backward.default
embedding_bag_weights_backward = torch.ops.aten._embedding_bag_per_sample_weights_backward.default
embedding_backward = torch.ops.aten.embedding_backward.default
