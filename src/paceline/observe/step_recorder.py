"""Follows the steps of one wrapper and hands each to the recorder when it is over.

Told by the wrapper's forwards (ddp/forward_pass.py), its clock (step_clock.py) and its optimizers
(ddp/autograd/optimizer_steps.py). Everything here runs in every step: it takes stamps and keeps
references, nothing else. Must not know files.

[Note: when a step is over]
Nobody says so. After the backward come clipping, one optimizer or several, and whatever the script
logs. So a step is *pending* from its last reduction on, and over with the next forward: of its own
wrapper, or of another one if an optimizer has stepped; or when the process ends. A killed process
loses the record of its pending step. An evaluation (a forward without gradients) belongs to the
input of the step that follows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from paceline.observe.records import Activity
from paceline.observe.step_clock import Plan, StepClock, StepOutcome

if TYPE_CHECKING:
    from paceline.observe.recorder import Recorder

_FORWARD = Activity.FORWARD.value
_LOSS = Activity.LOSS.value
_INPUT = Activity.INPUT.value
_BACKWARD = Activity.BACKWARD.value
_WAITING = Activity.WAITING.value
_REDUCED = Activity.REDUCED.value
_OPTIMIZER = Activity.OPTIMIZER.value

NOBODY = -1
"""No wrapper runs a forward."""

_now_ns = time.perf_counter_ns


class PendingStep:
    """A step whose gradients are reduced and whose record is not written yet.

    It holds lists of stamps, never the wrapper: a recorder that waits for the next forward must not
    keep a model alive.
    """

    __slots__ = (
        "backward_began",
        "backward_ended",
        "began",
        "columns",
        "cpu_ns",
        "forward_began",
        "forward_ended",
        "is_over",
        "major_faults",
        "optimizer_began",
        "optimizer_ended",
        "outcome",
        "reduced",
        "samples",
        "step",
        "wrapper",
    )

    def __init__(self, wrapper: int, step: int, clock: StepClock, sizes: list[int]) -> None:
        self.wrapper = wrapper
        self.step = step
        self.columns = (sizes, clock.ready, clock.began, clock.ended)
        self.outcome = clock.outcome
        self.backward_began = clock.backward_began
        self.backward_ended = clock.backward_ended or clock.backward_began
        self.reduced = max(clock.ended, default=0) or clock.step_ended
        self.began = self.forward_began = self.forward_ended = self.samples = 0
        self.optimizer_began = self.optimizer_ended = 0
        self.cpu_ns = self.major_faults = 0
        self.is_over = False


class StepRecorder:
    """The steps of one wrapper.

    Args:
        recorder: Of this process.
        wrapper: Counts the wrappers of this process.
        parameters: Whose optimizers are listened to.
        identify: Tells the recorder who this rank is, once a step has shown it.
    """

    def __init__(
        self,
        recorder: Recorder,
        wrapper: int,
        parameters: Sequence[Any],
        identify: Callable[[], None],
    ) -> None:
        self.parameters = parameters
        self._recorder = recorder
        self._wrapper = wrapper
        self._identify: Callable[[], None] | None = identify
        self._step = 1
        self._plan: Plan | None = None
        self._sizes: list[int] = []
        self._pending: PendingStep | None = None
        self._forget_forwards()

    def _forget_forwards(self) -> None:
        self._began = self._forward_began = self._forward_ended = self._samples = 0

    # --- forward -------------------------------------------------------------------------------

    def on_forward(self, samples: int, *, is_training: bool) -> None:
        """A forward begins, with so many samples; outside of any backward."""
        recorder = self._recorder
        if recorder.pending:
            recorder.finish_steps(self._pending if is_training else None)
        now = _now_ns()
        if recorder.outermost in (NOBODY, self._wrapper):
            recorder.outermost = self._wrapper
            recorder.set_activity(_FORWARD, now, self._step)
        if is_training:
            self._samples += samples
            if not self._forward_began:
                self._forward_began = now
                self._began = recorder.last_ended or now

    def on_forward_end(self, *, is_training: bool) -> None:
        """A forward has ended, well or not."""
        recorder = self._recorder
        if recorder.outermost == NOBODY:
            return  # it ran inside of a backward
        now = _now_ns()
        if is_training:
            self._forward_ended = now
        if recorder.outermost == self._wrapper:
            recorder.outermost = NOBODY
            recorder.set_activity(_LOSS if is_training else _INPUT, now, self._step)

    # --- backward: the clock's observer --------------------------------------------------------

    def on_backward(self, clock: StepClock, *, is_joined: bool) -> None:
        """See :class:`paceline.observe.step_clock.StepObserver`."""
        if self._pending is not None and not self._pending.is_over:
            self._recorder.finish_steps(self._pending)
        if is_joined:
            self._began = self._recorder.last_ended or clock.backward_began
        activity = _WAITING if is_joined else _BACKWARD
        self._recorder.set_activity(activity, clock.backward_began, self._step)

    def on_backward_end(self, clock: StepClock) -> None:
        """See :class:`paceline.observe.step_clock.StepObserver`."""
        self._recorder.set_activity(_WAITING, clock.backward_ended, self._step)

    def on_step_end(
        self, clock: StepClock, steps: int, last_rank: Callable[[int], int] | None
    ) -> None:
        """See :class:`paceline.observe.step_clock.StepObserver`."""
        recorder = self._recorder
        recorder.outermost = NOBODY
        recorder.last_ended = clock.step_ended
        if clock.outcome is StepOutcome.FAILED:
            self._step = steps + 1
            recorder.set_activity(_INPUT, clock.step_ended, self._step)
            self._forget_forwards()
            return
        if clock.plan is not self._plan:
            self._describe_buckets(clock.plan, steps)
        self._pending = self._make_pending(clock, steps)
        recorder.set_activity(_REDUCED, clock.step_ended, steps)
        recorder.add_pending(self._pending, last_rank)
        self._step = steps + 1

    def _make_pending(self, clock: StepClock, steps: int) -> PendingStep:
        pending = PendingStep(self._wrapper, steps, clock, self._sizes)
        pending.began = self._began or self._forward_began or clock.backward_began
        pending.forward_began = self._forward_began
        pending.forward_ended = self._forward_ended
        pending.samples = self._samples
        self._forget_forwards()
        return pending

    def _describe_buckets(self, plan: Plan | None, step: int) -> None:
        """Buckets were cut anew."""
        self._plan = plan
        buckets = plan.buckets if plan is not None else ()
        self._sizes = [bucket.nbytes for bucket in buckets]
        self._recorder.describe_buckets(self._wrapper, buckets, step)
        identify, self._identify = self._identify, None
        if identify is not None:
            identify()

    # --- optimizers ----------------------------------------------------------------------------

    def on_optimizer_begin(self) -> None:
        """An optimizer that holds some of these parameters begins to step."""
        pending = self._pending
        if pending is None or pending.is_over:
            return  # inside of a backward, or on gradients that were not reduced
        now = _now_ns()
        if not pending.optimizer_began:
            pending.optimizer_began = now
        self._recorder.set_activity(_OPTIMIZER, now, pending.step)

    def on_optimizer_step(self) -> None:
        """It has stepped."""
        pending = self._pending
        if pending is None or pending.is_over:
            return
        recorder = self._recorder
        recorder.last_ended = pending.optimizer_ended = now = _now_ns()
        usage = recorder.usage
        usage.sample()
        pending.cpu_ns, pending.major_faults = usage.cpu_ns, usage.major_faults
        recorder.set_activity(_INPUT, now, self._step)
