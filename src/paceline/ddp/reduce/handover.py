"""Hands buckets over when their gradients are final: for an optimizer that steps in the backward.

:mod:`paceline.ddp.reduce.progress` calls it whenever it looks at the buckets anyway, and the end of
a step once more.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Protocol

from paceline.buckets import Bucket
from paceline.config import NonFinite, ReducePolicy
from paceline.ddp.reduce.launch import BucketLauncher
from paceline.ddp.reduce.publish import publish_sparse
from paceline.ddp.reduce.step import Step


class BucketConsumer(Protocol):
    """Who gets buckets as soon as they are final.

    Attributes:
        is_active: Whether it wants any.
    """

    is_active: bool

    def take(self, bucket: Bucket, left: Set[int]) -> None:
        """A bucket is final; slots that are ``left`` to another step are not meant."""


@dataclass(frozen=True)
class StepEnds:
    """Is told of the end of a step.

    Attributes:
        consumer: Gets each bucket as soon as it is final.
        after_step: Called last, whatever became of the step.
    """

    consumer: BucketConsumer | None = None
    after_step: Callable[[], None] | None = None


class Handover:
    """In order, each bucket once a step."""

    def __init__(self, consumer: BucketConsumer | None) -> None:
        self._consumer = consumer
        self._handed_over = 0

    def open(self) -> None:
        """Begin a step."""
        self._handed_over = 0

    def take_reduced(self, step: Step, launcher: BucketLauncher, policy: ReducePolicy) -> None:
        """Hand over what is reduced already, if that makes it final."""
        if self._consumer is None or not self._consumer.is_active or _is_undecided(step, policy):
            return
        while self._handed_over < launcher.launched:
            bucket = launcher.buckets[self._handed_over]
            if not launcher.is_reduced(bucket):
                return
            self._handed_over += 1
            launcher.wait(step, bucket)
            mine = [s for s in step.unpublished if s.bucket_index == bucket.index]
            step.unpublished = [s for s in step.unpublished if s.bucket_index != bucket.index]
            step.access.publish(mine)
            publish_sparse(step, bucket)
            self._consumer.take(bucket, step.left)

    def take_rest(self, step: Step, launcher: BucketLauncher) -> None:
        """Hand over the others: the step is good."""
        if self._consumer is not None and self._consumer.is_active:
            for bucket in launcher.buckets[self._handed_over :]:
                self._consumer.take(bucket, step.left)


def _is_undecided(step: Step, policy: ReducePolicy) -> bool:
    """Whether what a bucket holds is not final before the whole step has been decided upon."""
    is_checked = policy.tracks_unused or policy.nonfinite is not NonFinite.IGNORE
    return is_checked or step.weight is not None or bool(step.shared)
