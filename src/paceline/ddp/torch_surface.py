"""Names of torch's class that torch's own code, its tests and real programs call.

The base of the wrapper. What torch's class does well without its C++ reducer is inherited
(``scatter``, ``gather``, ``to_kwargs``, ``train``, ignore lists, the parameter listing); what it
does through that reducer is defined here on top of ours.
"""

from __future__ import annotations

import copy
import os
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.ddp.agree.init_sync import BROADCAST_CHUNK_BYTES, broadcast_module
from paceline.ddp.agree.peers import Peers
from paceline.ddp.arguments import warn_unused_and_static
from paceline.ddp.features.buffers import Moment, RegisteredBufferHook
from paceline.ddp.features.join import find_common_rank
from paceline.ddp.logging_data import LoggingNames
from paceline.ddp.manual_finalization import ManualFinalization
from paceline.ddp.recording import note_group
from paceline.ddp.reduce.comm_hook import RegisteredHook, builtin_allreduce, builtin_fp16
from paceline.ddp.without_shards import excludes_shards
from paceline.errors import (
    AlreadyTrainingError,
    ArgumentTypeError,
    ConfigurationError,
    NotPicklableError,
)
from paceline.torch_private.groups import default_group, is_outside_group
from paceline.torch_private.modules import (
    FIRST_BUCKET_BYTES,
    BufferHookLocation,
    BuiltinHookType,
    TorchDDP,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.ddp.features.buffers import BufferSync
    from paceline.ddp.features.delayed import DelayedReduction
    from paceline.ddp.features.shard_rounds import ShardRounds
    from paceline.ddp.reduce.reducer import Reducer
    from paceline.ddp.settings import Settings
    from paceline.transport import DeferredTransport

COMPILED_GRAPH_BYTES = 25 * 1024 * 1024
"""Torch's bucket size, if nobody asks for another."""

_NOT_PICKLED = (
    "process_group",
    "device_mesh",
    "reducer",
    "logger",
    "_transport",
    "_peers",
    "_buffer_sync",
    "_delayed",
    "_forward_pass",
    "_inner",
    "_shard_rounds",
    "_comm_hooks",
)


class TorchSurface(LoggingNames, ManualFinalization):
    """torch's private names, on Paceline's parts.

    Attributes:
        compiled_graph_bytes: After so many bytes of parameters torch.compile begins a new graph.
    """

    compiled_graph_bytes: int = COMPILED_GRAPH_BYTES
    reducer: Reducer | None
    _buffer_sync: BufferSync
    _settings: Settings
    _build_parts: Callable[[], None]
    _make_transport: Callable[[Any], DeferredTransport]
    _set_hook: Callable[[RegisteredHook], None]
    _delayed: DelayedReduction | None
    _shard_rounds: ShardRounds | None

    def _set_torch_attributes(self, settings: Settings) -> None:
        """Set the attributes under which torch's class can be asked about its arguments."""
        placement, caps = settings.placement, settings.caps
        self.device = placement.device
        self.device_type = placement.device.type
        self.device_ids = placement.device_ids
        self.output_device = placement.output_device
        self.is_multi_device_module = placement.is_multi_device
        self.forward_sync_buffers = settings.buffers.in_forward
        self.find_unused_parameters = settings.policy.find_unused
        self.static_graph = settings.policy.static_graph
        self.batched_grad_copy = settings.policy.batched_copy
        self.lazy_bucket_allocation = settings.policy.lazy_buckets
        self.skip_all_reduce_unused_params = settings.policy.skip_unused
        self.mixed_precision = settings.mixed_precision
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.broadcast_bucket_size = BROADCAST_CHUNK_BYTES
        self._bucket_bytes_cap = caps.cap_bytes
        self.bucket_bytes_cap_list = list(caps.listed)
        self.bucket_bytes_cap_default = caps.first_cap_bytes < caps.cap_bytes
        self.use_side_stream_for_tensor_copies = (
            os.environ.get("PYTORCH_DDP_USE_SIDE_STREAM", "1") == "1"
        )
        self._divide_by_initial_world_size = True
        self._use_python_reducer = False
        self._ddp_sink_clone = True
        self._forwards = 0

    @property
    def bucket_bytes_cap(self) -> int:
        """How large buckets may be; inside of a forward, how large a compiled graph may be.

        Dynamo asks for it there, and splits what it compiles after so many bytes of parameters.
        With torch's wrapper these are the buckets: whoever tunes one gets the other.
        """
        if TorchDDP._active_ddp_module is self:
            return max(self.compiled_graph_bytes, FIRST_BUCKET_BYTES)
        return self._bucket_bytes_cap

    @bucket_bytes_cap.setter
    def bucket_bytes_cap(self, value: int) -> None:
        self._bucket_bytes_cap = value

    def _require_reducer(self, what: str) -> Reducer:
        if self.reducer is None:
            raise ConfigurationError(
                f"{what} needs parameters that this wrapper reduces bucket by bucket, but all of "
                "them are delayed (delay_all_reduce_named_params) or reduced by a wrapper inside."
            )
        return self.reducer

    # --- pickling ------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        self._check_default_group()
        state = copy.copy(self.__dict__)
        for name in _NOT_PICKLED:
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        from paceline.ddp.logging_data import LoggingData

        torch.nn.Module.__setstate__(self, state)
        self.process_group = default_group()
        self.device_mesh = None
        self._delayed = None
        self.logger = LoggingData()
        self._module_parameters = [
            p for n, p in self.module.named_parameters() if n not in self.parameters_to_ignore
        ]
        self._build_parts()
        self._restore_finalization()

    def _check_default_group(self) -> None:
        if dist.is_initialized() and self.process_group == default_group():
            return
        raise NotPicklableError(
            "DDP Pickling/Unpickling are only supported when using DDP with the default process "
            "group, because other groups cannot be found again. Save ddp.module.state_dict() "
            "instead."
        )

    # --- buffers -------------------------------------------------------------------------------

    @property
    def modules_buffers(self) -> list[torch.Tensor]:  # type: ignore[override]
        """The buffers that are synchronised."""
        return list(self._buffer_sync.named.values())

    @property
    def named_module_buffers(self) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """The buffers that are synchronised, by name."""
        return self._buffer_sync.named

    def _assign_modules_buffers(self) -> None:
        self._buffer_sync.refresh()

    def will_sync_module_buffers(self) -> bool:
        """Say whether the next forward synchronises buffers."""
        return bool(
            self.require_forward_param_sync
            and self.forward_sync_buffers
            and self._buffer_sync.named
        )

    def _register_buffer_comm_hook(
        self,
        state: Any,
        hook: Any,
        comm_hook_location: BufferHookLocation = BufferHookLocation.POST_FORWARD,
    ) -> None:
        """Let ``hook(state, named_buffers)`` take the place of the broadcast of buffers.

        It may return futures; the end of the backward waits for them.
        """
        if self._shard_rounds is not None:
            raise excludes_shards("_register_buffer_comm_hook()")
        if not callable(hook):
            raise AssertionError(
                f"A buffer hook must be callable, got {type(hook).__name__}: {hook!r}. Write "
                "def hook(state, named_buffers)."
            )
        moment = Moment(comm_hook_location)
        self._buffer_sync.hook = RegisteredBufferHook(hook, state, moment)

    def _distributed_broadcast_coalesced(
        self, tensors: list[torch.Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        self._buffer_sync.broadcast(tensors, buffer_size, authoritative_rank)

    def _default_broadcast_coalesced(
        self,
        bufs: list[torch.Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        """Broadcast buffers as if there were no hook."""
        self._buffer_sync.broadcast(
            self.modules_buffers if bufs is None else bufs,
            bucket_size or self.broadcast_bucket_size,
            authoritative_rank,
        )

    # --- hooks and graph -----------------------------------------------------------------------

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Register one of torch's two built-in hooks."""
        known = {
            BuiltinHookType.ALLREDUCE: builtin_allreduce,
            BuiltinHookType.FP16_COMPRESS: builtin_fp16,
        }
        if not isinstance(comm_hook_type, BuiltinHookType):
            raise ArgumentTypeError(
                f"comm_hook_type is a member of dist.BuiltinCommHookType, not {comm_hook_type!r}. "
                "Functions are registered with register_comm_hook(state, hook)."
            )
        group, hook = self.process_group, known[comm_hook_type]
        self._set_hook(RegisteredHook(hook, group, str(comm_hook_type), group))

    def _set_static_graph(self) -> None:
        """Promise that the graph never changes."""
        if self._shard_rounds is not None:
            raise excludes_shards("static_graph")
        if self.static_graph:
            warnings.warn(
                "You've set static_graph to be True, no need to set it again.", stacklevel=2
            )
            return
        if self._forwards:
            error = AlreadyTrainingError(
                "_set_static_graph() should be called before training loop starts and after "
                f"DistributedDataParallel is constructed, but {self._forwards} forward passes have "
                "run. Pass static_graph=True to the constructor."
            )
            self.logger.set_error(error)
            raise error
        self.static_graph = True
        self._settings = replace(
            self._settings, policy=replace(self._settings.policy, static_graph=True)
        )
        if self.reducer is not None:
            self.reducer.runner.change_policy(self._settings.policy)
        self.logger.set("static_graph", 1)
        warn_unused_and_static(self.find_unused_parameters, True)

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Kept for torch's callers: outputs are never cloned here."""
        self._ddp_sink_clone = val

    def _remove_autograd_hooks(self) -> None:
        """Stop listening to gradients."""
        if self.reducer is not None:
            self.reducer._remove_autograd_hooks()

    def _check_reducer_finalized(self) -> None:
        """Raise if the last backward did not complete its reductions."""
        if self.reducer is not None:
            self.reducer._check_reducer_finalized()

    def _set_sparse_metadata(self, global_unique_ids: dict[str, torch.Tensor]) -> None:
        """Say which rows a sparse gradient may have, by parameter name, equal on all ranks."""
        self._require_reducer("_set_sparse_metadata()")._set_sparse_metadata(global_unique_ids)

    def _update_process_group(self, new_process_group: Any) -> None:
        """Go on with another group; call it between steps, on every rank of the old one."""
        if is_outside_group(new_process_group):
            return
        self.process_group = new_process_group
        self._transport = self._make_transport(new_process_group)
        self._peers = Peers(self.process_group, self._transport, self.device)
        self._buffer_sync.transport = self._transport
        if self.reducer is not None:
            registered = self.reducer.registered
            if registered.hook is not None:
                registered.hook = registered.hook.in_group(new_process_group)
            self.reducer.runner.change_group(self._transport, self._peers)
            if self._shard_rounds is not None:
                self._shard_rounds.regroup(self._transport.rank, self._transport.world)
                self.require_backward_grad_sync = True  # a loop may have been left in the middle
            note_group(self._transport)

    # --- join ----------------------------------------------------------------------------------

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        self._authoritative_rank = find_common_rank(self, is_last_joiner)
        broadcast_state(self, self._authoritative_rank, with_buffers=self.forward_sync_buffers)
        if self.reducer is not None:
            self.reducer.drift.forget()

    @property
    def join_device(self) -> torch.device:
        """Where the join context's own messages live."""
        return self._settings.placement.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group that the join context talks over."""
        return self.process_group


def broadcast_state(ddp: TorchSurface, source: int, *, with_buffers: bool) -> None:
    """Give all ranks the parameters, and buffers, of one."""
    messages, ignored = ddp._transport.messages, ddp.parameters_to_ignore
    broadcast_module(
        ddp.module, messages, source=source, ignored=ignored, with_buffers=with_buffers
    )
