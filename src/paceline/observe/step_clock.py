"""The clock of a wrapper: stamps of the step under way, and who is told when they are taken.

Moved on by the reducer, read by ``ddp.stats()`` and torch's logging data. The reducer knows no
recorder: it tells the clock, and the clock tells its observer, if it has one. Must not know about
groups, tensors or files.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class StepOutcome(enum.Enum):
    """What became of a step."""

    FAILED = enum.auto()
    """It raised on every rank. So is every step until it is known better."""

    REDUCED = enum.auto()
    """Its gradients are averages."""

    SKIPPED = enum.auto()
    """Left out by ``nonfinite="skip"``."""

    JOINED = enum.auto()
    """A step of the others: this rank has run out of inputs (``join``)."""


class PlannedParameter(Protocol):
    """A parameter in a plan."""

    @property
    def name(self) -> str:
        """As in ``named_parameters()``."""


class PlannedBucket(Protocol):
    """What a plan says of one bucket."""

    @property
    def nbytes(self) -> int:
        """Bytes of gradients."""

    @property
    def parameters(self) -> Sequence[PlannedParameter]:
        """In the bucket's order."""


class Plan(Protocol):
    """How parameters are cut into buckets."""

    @property
    def buckets(self) -> Sequence[PlannedBucket]:
        """In the order in which they start."""


class StepObserver(Protocol):
    """Is told of the moments of a step. Must be quick, and must not raise."""

    def on_forward(self, samples: int, *, is_training: bool) -> None:
        """A forward begins, with so many samples; not inside of a backward."""

    def on_forward_end(self, *, is_training: bool) -> None:
        """A forward has ended, well or not."""

    def on_backward(self, clock: StepClock, *, is_joined: bool) -> None:
        """A step has begun: with a backward, or because the others have one."""

    def on_backward_end(self, clock: StepClock) -> None:
        """The last gradient is computed; from now on the rank waits."""

    def on_step_end(
        self, clock: StepClock, steps: int, last_rank: Callable[[int], int] | None
    ) -> None:
        """The step is over.

        Args:
            clock: Has its stamps and its outcome.
            steps: How many there were, failed ones included.
            last_rank: Says on which rank a bucket was ready last, if somebody wants to know.
        """


@dataclass(eq=False)
class StepClock:
    """Nanosecond stamps of one step, taken as it goes. Zero means: not yet."""

    forward_began: int = 0
    backward_began: int = 0
    backward_ended: int = 0
    step_ended: int = 0
    ready: list[int] = field(default_factory=list)
    began: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    outcome: StepOutcome = StepOutcome.FAILED
    plan: Plan | None = None
    observer: StepObserver | None = None

    def start_forward(self) -> None:
        """A forward begins that will be synchronised."""
        self.forward_began = time.perf_counter_ns()

    def start_backward(self, buckets: int, *, is_joined: bool) -> None:
        """Forget the previous step's buckets."""
        self.backward_began = time.perf_counter_ns()
        self.backward_ended = 0
        self.outcome = StepOutcome.FAILED
        self.ready = [0] * buckets
        self.began = [0] * buckets
        self.ended = [0] * buckets
        if self.observer is not None:
            self.observer.on_backward(self, is_joined=is_joined)

    def end_backward(self) -> None:
        """The last gradient is computed."""
        self.backward_ended = time.perf_counter_ns()
        if self.observer is not None:
            self.observer.on_backward_end(self)

    def end_step(self, steps: int, last_rank: Callable[[int], int] | None) -> None:
        """The step is over, well or not: see :meth:`StepObserver.on_step_end`."""
        self.step_ended = time.perf_counter_ns()
        if self.observer is not None:
            self.observer.on_step_end(self, steps, last_rank)

    def since_backward_ms(self, stamp: int) -> float:
        """Translate a stamp for people."""
        return (stamp - self.backward_began) / 1e6 if stamp else 0.0

    def exposed_ms(self, bucket: int) -> float:
        """How long a bucket's reduction went on after the last gradient was computed."""
        hidden_until = max(self.began[bucket], self.backward_ended)
        return max(0.0, (self.ended[bucket] - hidden_until) / 1e6)
