"""Times of a step, and the immutable summary that ``ddp.stats()`` returns.

Written by ddp/reduce (snapshot.py has the counters), read by users and by the logging data. Must
not know about groups or tensors.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class BucketStats:
    """One bucket in the most recent reduced step. Times are milliseconds since backward began.

    Attributes:
        index: Its place in the order in which reductions start.
        bytes: Bytes of gradients.
        parameters: Names of the parameters, in the bucket's order.
        ready_ms: When its last gradient arrived.
        began_ms: When its reduction, or its hook, was started.
        ended_ms: When the reduced values were there.
        exposed_ms: The part of the reduction that backward did not hide.
        last_rank: The rank on which the bucket was ready last; -1 before the first step.
    """

    index: int
    bytes: int
    parameters: tuple[str, ...]
    ready_ms: float = 0.0
    began_ms: float = 0.0
    ended_ms: float = 0.0
    exposed_ms: float = 0.0
    last_rank: int = -1


@dataclass(frozen=True)
class DDPStats:
    """What ``ddp.stats()`` returns: a snapshot that never changes.

    Attributes:
        steps: Steps reduced so far, skipped ones included.
        skipped_steps: Steps left out by ``nonfinite="skip"``.
        transport: What the buckets travel over: ``"shm"``, ``"c10d:gloo"`` and so on.
        transport_reason: Why that and nothing else.
        buckets: One entry per bucket, in the order in which they start.
        backward_ms: How long the most recent backward computed, without waiting for buckets.
        exposed_ms: Milliseconds at the end of that backward spent waiting for reductions.
        reduced_bytes: Bytes of gradients this rank has reduced since construction.
    """

    steps: int
    skipped_steps: int
    transport: str
    transport_reason: str
    buckets: tuple[BucketStats, ...]
    backward_ms: float
    exposed_ms: float
    reduced_bytes: int


@dataclass
class StepClock:
    """Nanosecond stamps of one step, taken as it goes. Zero means: not yet."""

    forward_began: int = 0
    backward_began: int = 0
    backward_ended: int = 0
    step_ended: int = 0
    ready: list[int] = field(default_factory=list)
    began: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)

    def start_forward(self) -> None:
        """A forward begins that will be synchronised."""
        self.forward_began = time.perf_counter_ns()

    def start_backward(self, buckets: int) -> None:
        """Forget the previous step's buckets."""
        self.backward_began = time.perf_counter_ns()
        self.backward_ended = 0
        self.ready = [0] * buckets
        self.began = [0] * buckets
        self.ended = [0] * buckets

    def since_backward_ms(self, stamp: int) -> float:
        """Translate a stamp for people."""
        return (stamp - self.backward_began) / 1e6 if stamp else 0.0

    def exposed_ms(self, bucket: int) -> float:
        """How long a bucket's reduction went on after the last gradient was computed."""
        hidden_until = max(self.began[bucket], self.backward_ended)
        return max(0.0, (self.ended[bucket] - hidden_until) / 1e6)
