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
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from paceline.observe.logged import LoggedValues
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

_RECENT = 8

NOBODY = -1
"""No wrapper runs a forward."""

_now_ns = time.perf_counter_ns


class PendingStep:
    """A step whose record is not written yet: it is under way, or reduced and not over.

    It holds lists of stamps, never the wrapper: a recorder that waits for the next forward must not
    keep a model alive. What has not happened is 0, here and in the record.
    """

    wrapper = step = samples = cpu_ns = major_faults = first_reduction = 0
    began = forward_began = forward_ended = backward_began = backward_ended = reduced = 0
    optimizer_began = optimizer_ended = 0
    sizes: Sequence[int] = ()
    ready: Sequence[int] = ()
    reductions_began: Sequence[int] = ()
    reductions_ended: Sequence[int] = ()
    outcome = StepOutcome.FAILED
    logged = LoggedValues()
    is_over = False


class StepRecorder:
    """The steps of one wrapper.

    Attributes:
        wrapper: Its number.
        step: The one under way, or the next.
        reductions: How many buckets were reduced before it.
        recent: The last steps, the newest last: a stall report tells their reductions.

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
        self.wrapper = wrapper
        self._identify: Callable[[], None] | None = identify
        self.step = 1
        self.reductions = 0
        self.recent: deque[PendingStep] = deque(maxlen=_RECENT)
        self._plan: Plan | None = None
        self._sizes: list[int] = []
        self._current = PendingStep()
        self._pending: PendingStep | None = None

    # --- forward -------------------------------------------------------------------------------

    def on_forward(self, samples: int, *, is_training: bool) -> None:
        """A forward begins, with so many samples; outside of any backward."""
        recorder = self._recorder
        if recorder.pending:
            recorder.finish_steps(self._pending if is_training else None)
        elif not is_training:
            recorder.write_if_due()
        now = _now_ns()
        if recorder.outermost in (NOBODY, self.wrapper):
            recorder.outermost = self.wrapper
            recorder.is_evaluating = not is_training
            recorder.set_activity(_FORWARD, now, self.step)
        if is_training:
            step = self._current
            step.samples += samples
            if not step.forward_began:
                step.forward_began = now
                step.began = recorder.last_ended or now

    def on_forward_end(self, *, is_training: bool) -> None:
        """A forward has ended, well or not."""
        recorder = self._recorder
        if recorder.outermost == NOBODY:
            return  # it ran inside of a backward
        now = _now_ns()
        if is_training:
            self._current.forward_ended = now
        if recorder.outermost == self.wrapper:
            recorder.outermost = NOBODY
            recorder.set_activity(_LOSS if is_training else _INPUT, now, self.step)

    # --- backward: the clock's observer --------------------------------------------------------

    def on_backward(self, clock: StepClock, *, is_joined: bool) -> None:
        """See :class:`paceline.observe.step_clock.StepObserver`."""
        if self._pending is not None and not self._pending.is_over:
            self._recorder.finish_steps(self._pending)
        if is_joined:
            self._current.began = self._recorder.last_ended or clock.backward_began
        activity = _WAITING if is_joined else _BACKWARD
        self._recorder.set_activity(activity, clock.backward_began, self.step)

    def on_backward_end(self, clock: StepClock) -> None:
        """See :class:`paceline.observe.step_clock.StepObserver`."""
        self._recorder.set_activity(_WAITING, clock.backward_ended, self.step)

    def on_step_end(
        self, clock: StepClock, steps: int, last_rank: Callable[[int], int] | None
    ) -> None:
        """See :class:`paceline.observe.step_clock.StepObserver`."""
        recorder = self._recorder
        recorder.outermost = NOBODY
        recorder.last_ended = clock.step_ended
        step, self._current = self._current, PendingStep()
        self.step = steps + 1
        if clock.outcome is StepOutcome.FAILED:
            self.reductions += len(clock.ended)
            recorder.set_activity(_INPUT, clock.step_ended, self.step)
            return
        if clock.plan is not self._plan:
            self._describe_buckets(clock.plan, steps)
        self._fill_in(step, clock)
        self.reductions += len(clock.ended)
        self.recent.append(step)
        step.step = steps
        self._pending = step
        recorder.set_activity(_REDUCED, clock.step_ended, steps)
        recorder.add_pending(step, last_rank)

    def _fill_in(self, step: PendingStep, clock: StepClock) -> None:
        """Take over what the clock has seen."""
        began, ended = clock.backward_began, clock.ended
        step.wrapper = self.wrapper
        step.first_reduction = self.reductions
        step.outcome = clock.outcome
        step.began = step.began or began
        step.backward_began = began
        step.backward_ended = clock.backward_ended or began
        step.reduced = max(ended, default=0) or clock.step_ended
        step.sizes, step.ready = self._sizes, clock.ready
        step.reductions_began, step.reductions_ended = clock.began, ended

    def _describe_buckets(self, plan: Plan | None, step: int) -> None:
        """Buckets were cut anew."""
        self._plan = plan
        buckets = plan.buckets if plan is not None else ()
        self._sizes = [bucket.nbytes for bucket in buckets]
        self._recorder.describe_buckets(self.wrapper, buckets, step)
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
        if usage.sample(now):
            pending.cpu_ns, pending.major_faults = usage.cpu_ns, usage.major_faults
        recorder.set_activity(_INPUT, now, self.step)
