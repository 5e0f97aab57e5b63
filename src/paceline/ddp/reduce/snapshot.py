"""Counters of a reducer, and the snapshot that ``ddp.stats()`` returns (:mod:`paceline.observe`).

Kept by :mod:`paceline.ddp.reduce.step_runner`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.buckets import Bucket
from paceline.ddp.agree.control import ControlBlock
from paceline.observe import BucketStats, DDPStats, StepClock
from paceline.types import Transport


@dataclass
class Counters:
    """What is counted over all steps.

    Attributes:
        steps: Steps that have ended, failed and skipped ones included.
        skipped_steps: Those left out by ``nonfinite="skip"``.
        reduced_bytes: Bytes of gradients that were reduced.
        buckets_reduced: Buckets reduced in the latest step.
    """

    steps: int = 0
    skipped_steps: int = 0
    reduced_bytes: int = 0
    buckets_reduced: int = 0

    def count_reduced(self, buckets: Sequence[Bucket]) -> None:
        """A step has reduced these."""
        self.buckets_reduced = len(buckets)
        self.reduced_bytes += sum(bucket.spec.nbytes for bucket in buckets)


def take_snapshot(
    counters: Counters,
    transport: Transport,
    buckets: Sequence[Bucket],
    clock: StepClock,
    block: ControlBlock | None,
) -> DDPStats:
    """Describe counters and buckets; with times once a step of this plan has been reduced."""
    exposed_ns = max((end - clock.backward_ended for end in clock.ended), default=0)
    timed = block if len(clock.ended) == len(buckets) else None
    return DDPStats(
        steps=counters.steps,
        skipped_steps=counters.skipped_steps,
        transport=transport.name,
        transport_reason=transport.reason,
        buckets=tuple(_describe(bucket, clock, timed) for bucket in buckets),
        backward_ms=clock.since_backward_ms(clock.backward_ended),
        exposed_ms=max(0.0, exposed_ns / 1e6),
        reduced_bytes=counters.reduced_bytes,
    )


def _describe(bucket: Bucket, clock: StepClock, block: ControlBlock | None) -> BucketStats:
    index = bucket.index
    names = tuple(slot.spec.name for slot in bucket.slots)
    if block is None:
        return BucketStats(index, bucket.spec.nbytes, names)
    return BucketStats(
        index,
        bucket.spec.nbytes,
        names,
        ready_ms=clock.since_backward_ms(clock.ready[index]),
        began_ms=clock.since_backward_ms(clock.began[index]),
        ended_ms=clock.since_backward_ms(clock.ended[index]),
        exposed_ms=clock.exposed_ms(index),
        last_rank=block.last_rank(index),
    )
