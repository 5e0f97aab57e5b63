"""Makes the snapshot that ``ddp.stats()`` returns."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.buckets import Bucket
from paceline.ddp.agree.control import ControlBlock
from paceline.observe import BucketStats, StepClock


def summarize_buckets(
    buckets: Sequence[Bucket], clock: StepClock, block: ControlBlock | None
) -> tuple[BucketStats, ...]:
    """Describe every bucket; with times once a step of this plan has been reduced."""
    has_times = block is not None and len(clock.ended) == len(buckets)
    return tuple(_describe(bucket, clock, block if has_times else None) for bucket in buckets)


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
