"""What a wrapper does before and after its module's forward.

Owned and called by :mod:`paceline.ddp.wrapper`. It holds what only forwards need. What torch's
names show (``require_backward_grad_sync``, buffers, the group) stays with the wrapper, which is
passed to each call: a reference to it would be a cycle, and keep buckets until the collector runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paceline.ddp.features.buffers import Moment
from paceline.ddp.features.foreign import ForeignGuard
from paceline.ddp.features.join import enter_joined, is_unmirrored
from paceline.ddp.features.optimizer_in_backward import OptimizersInBackward
from paceline.ddp.features.precision import PrecisionSwap
from paceline.ddp.module_watch import ModuleWatch
from paceline.ddp.recording import tell_forward
from paceline.ddp.reduce.reducer import Reducer
from paceline.errors import ParametersChangedError
from paceline.torch_private.autograd import is_inside_backward
from paceline.torch_private.modules import move_inputs

if TYPE_CHECKING:
    from paceline.ddp.wrapper import DistributedDataParallel

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class ForwardPass:
    """The forwards of one wrapper."""

    def __init__(
        self,
        reducer: Reducer | None,
        swap: PrecisionSwap | None,
        watch: ModuleWatch,
        foreign: ForeignGuard | None,
        optimizers: OptimizersInBackward,
    ) -> None:
        self._reducer = reducer
        self._swap = swap
        self._watch = watch
        self._foreign = foreign
        self._optimizers = optimizers
        self._runs_own_parameters = True
        self._is_first = True
        self._compares = reducer is not None and reducer.runner.context.replicas is not None

    def enter(
        self, ddp: DistributedDataParallel, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments:
        """Prepare all parts; return the arguments that the module is called with."""
        ddp._peers.check_process()
        if self._is_first:
            self._is_first = False
            ddp._lazy_init()
        reducer = self._reducer
        if reducer is not None:
            self._enter_reducer(ddp, reducer, inputs, kwargs)
        if ddp.device_ids:
            target = torch.device(ddp.device_type, ddp.device_ids[0])
            side_stream = ddp.use_side_stream_for_tensor_copies
            inputs, kwargs = move_inputs(inputs, kwargs, target, side_stream)
        if self._swap is not None:
            inputs, kwargs = self._swap.cast_inputs(inputs, kwargs)
            if self._swap.enter() and reducer is not None:
                reducer.hooks.attach()  # [Note: exchanged data] in precision.py
        return inputs, kwargs

    def _enter_reducer(
        self, ddp: DistributedDataParallel, reducer: Reducer, inputs: Any, kwargs: Any
    ) -> None:
        has_equal_buffers = False
        if ddp._shard_rounds is not None and not is_inside_backward():
            ddp._shard_rounds.on_forward(is_training=torch.is_grad_enabled())
        if torch.is_grad_enabled():
            self.begin(ddp, reducer, inputs, kwargs)
        if reducer.clock.observer is not None:
            tell_forward(reducer.clock.observer, inputs, kwargs)
        if ddp._join_config.enable:
            enter_joined(ddp, reducer)
        elif ddp._syncs_buffers(Moment.BEFORE_FORWARD):
            ddp._sync_buffers()
            has_equal_buffers = ddp._buffer_sync.hook is None
        if self._compares and ddp._will_sync() and not is_inside_backward():
            reducer.look_at_replica(with_buffers=has_equal_buffers)

    def take_over_optimizers(self, ddp: DistributedDataParallel) -> None:
        """Let optimizers that step in the backward wait for the average."""
        if self._reducer is not None:
            self._optimizers.take_over(self._reducer.parameters)
        if ddp._delayed is not None:
            ddp._delayed.take_over_optimizers()

    def begin(
        self, ddp: DistributedDataParallel, reducer: Reducer, inputs: Any = (), kwargs: Any = None
    ) -> None:
        """A forward with gradients begins: make its step possible, if it is synchronised."""
        if reducer.drift.abandoned:
            reducer.drift.begin_again((inputs, kwargs))
        if not ddp.require_backward_grad_sync or is_inside_backward():
            return
        if self._foreign is not None:
            self._foreign.check()
        self._runs_own_parameters = self._watch.is_unchanged() or self._look(ddp, reducer)
        reducer.prepare_forward()
        if ddp.logger.is_sampled(ddp._forwards):
            ddp.logger.sample(ddp._forwards, reducer.clock)
        ddp._forwards += 1
        reducer.clock.start_forward()

    def _look(self, ddp: DistributedDataParallel, reducer: Reducer) -> bool:
        """Look at a module that was changed; return whether it runs with its own parameters."""
        try:
            is_own = self._watch.look_again(reducer.rank)
        except ParametersChangedError as error:
            ddp.logger.set_error(error)
            raise
        if is_own:
            reducer.hooks.suspect()
        return is_own

    def abandon(self, ddp: DistributedDataParallel, inputs: Any, kwargs: Any) -> None:
        """The module's forward has raised."""
        self._tell_end()
        if self._reducer is not None and ddp._will_sync():
            self._reducer.drift.abandon((inputs, kwargs))

    def _tell_end(self) -> None:
        observer = self._reducer.clock.observer if self._reducer is not None else None
        if observer is not None:
            observer.on_forward_end(is_training=torch.is_grad_enabled())

    def leave(self, ddp: DistributedDataParallel, output: Any) -> Any:
        """Expect the backward of what the module has returned; return it, or what stands for it."""
        reducer = self._reducer
        if reducer is not None:
            if ddp._shard_rounds is not None and torch.is_grad_enabled():
                ddp._shard_rounds.on_output(output)
            if ddp._syncs_buffers(Moment.AFTER_FORWARD) and not is_unmirrored(ddp, reducer):
                ddp._sync_buffers()
            syncs = ddp._will_sync()
            ddp.require_forward_param_sync = syncs
            if syncs and self._runs_own_parameters:
                output = reducer.expect_backward_of(output)
            elif syncs:
                output = reducer.expect_if_reached(output)
            elif torch.is_grad_enabled():
                reducer.expect_local_gradients(ddp)
            if self._swap is not None and not syncs:
                self._swap.leave_after(output)
            self._tell_end()
        if ddp._delayed is not None and torch.is_grad_enabled():
            ddp._delayed.lend_views()
        return output
