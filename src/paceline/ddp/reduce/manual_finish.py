"""Steps that end when the program says so: ``require_manual_backward_finalization`` (torch 2.15).

[Note: manual finalization]
The end of the backward launches what is left, and the step is held: nobody waits for its buckets,
so that the program can do other work in the meantime. ``finalize_backward()`` waits for them,
decides with the peers and shows the results; errors of the step are raised there. Inside of the
backward, in a hook, it may be called as soon as all gradients have arrived.

A base of :class:`paceline.ddp.reduce.step_runner.StepRunner`; must not know more of it than what is
declared here. Errors have torch's words.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from paceline.buckets import Slot
from paceline.ddp.autograd.hooks import ReadyQueue
from paceline.ddp.reduce.arrivals import Arrivals
from paceline.ddp.reduce.context import ReduceContext
from paceline.ddp.reduce.progress import StepProgress
from paceline.ddp.reduce.step import Step
from paceline.ddp.reduce.step_state import StepPhase, without_graph
from paceline.errors import FinalizationError


class ManualFinish:
    """The end of a step that is held.

    Attributes:
        is_manual: Whether steps end with :meth:`finalize`, not with their backward.
    """

    phase: StepPhase
    context: ReduceContext
    progress: StepProgress
    queue: ReadyQueue
    _step: Step | None
    _arrivals: Arrivals
    _lock: threading.RLock
    _complete: Callable[[Step, Sequence[Slot]], None]
    is_manual = False

    def set_manual(self, required: bool) -> None:
        """Say who ends steps from now on.

        Raises:
            FinalizationError: If a step is under way.
        """
        if self.phase is not StepPhase.IDLE:
            raise self._error(
                "require_manual_backward_finalization cannot be called after forward while a "
                "backward pass is expected or in progress. Call it before forward or after "
                "backward finalization."
            )
        self.is_manual = required

    @property
    def held_step(self) -> Step | None:
        """The step that :meth:`finalize` will end, if its backward is over."""
        return self._step if self.phase is StepPhase.HELD else None

    @property
    def ends_after_backward(self) -> bool:
        """Whether the next step cannot be finalized from a hook inside of its backward.

        So it is while the order of gradients is learnt, and in a static graph their number.
        """
        learns = self._arrivals.log is not None and not self._arrivals.is_order_known
        return self.is_manual and learns

    def check_finalized(self) -> None:
        """Raise FinalizationError if a step is held."""
        if self.phase is StepPhase.HELD:
            raise self._error(
                "Expected to have finalized the prior backward pass before starting a new one. "
                "Call finalize_backward() after backward() when "
                "require_manual_backward_finalization is true."
            )

    def _hold(self, step: Step, missing: Sequence[Slot]) -> None:
        """The backward is over: launch what is left, and leave the rest to :meth:`finalize`."""
        if not step.is_cut_off:
            self.progress.take_absent(step, missing)
        self.phase = StepPhase.HELD

    def finalize(self) -> None:
        """Wait for all buckets, decide with the peers, and show the results.

        Raises:
            FinalizationError: If there is nothing to finalize, or not yet.
            StepError: If the step failed; on every rank.
        """
        self.context.peers.check_process()
        with self._lock, without_graph():
            step = self._finalizable()
            if self.phase is StepPhase.REDUCING:
                self._end_early(step)
            self._complete(step, ())

    def _finalizable(self) -> Step:
        if not self.is_manual:
            raise self._error(
                "finalize_backward() called but manual backward finalization is not required. Set "
                "require_manual_backward_finalization to true first."
            )
        if self._step is None:
            raise self._error(
                "finalize_backward() called but no gradient reduction requires finalization. This "
                "can happen if no_sync() is active or finalize_backward() was already called for "
                "this backward pass."
            )
        return self._step

    def _end_early(self, step: Step) -> None:
        """Called in the backward: all gradients must be there. The backward's end does nothing."""
        self.progress.take(step, *self.queue.take())
        waiting = self.progress.launcher.next_bucket()
        if waiting is not None:
            names = ", ".join(slot.spec.name for slot in self.progress.missing()[:5])
            raise self._error(
                "finalize_backward() called before all DDP buckets were ready: bucket "
                f"{waiting.index} of {len(self.progress.buckets)} still waits for gradients"
                f"{f' ({names})' if names else ''}. Call finalize_backward() only after all "
                "DDP-managed parameters have computed gradients, and after the backward if "
                "should_finalize_after_backward is True."
            )
        self.context.clock.end_backward()
        self.queue.stop_copying()

    def _error(self, text: str) -> FinalizationError:
        error = FinalizationError(f"Rank {self.context.transport.rank}: {text}")
        self.context.on_error(error)
        return error
