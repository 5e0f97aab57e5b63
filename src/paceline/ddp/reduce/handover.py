"""Hands buckets over when their gradients are final: for an optimizer that steps in the backward.

The reducer calls it whenever it looks at the buckets anyway, and once more at the end of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from paceline.buckets import Bucket
from paceline.config import NonFinite, ReducePolicy
from paceline.ddp.reduce.launch import Flight
from paceline.ddp.reduce.publish import show_sparse
from paceline.ddp.reduce.step import Step


class Drain:
    """In order, each bucket once a step.

    Attributes:
        after_bucket: Who gets them, and which slots are not meant; None is nobody.
    """

    def __init__(self) -> None:
        self.after_bucket: Callable[[Bucket, Set[int]], None] | None = None
        self._drained = 0

    def open(self) -> None:
        """Begin a step."""
        self._drained = 0

    def take_landed(self, step: Step, flight: Flight, policy: ReducePolicy) -> None:
        """Hand over what is reduced already, if that makes it final."""
        if self.after_bucket is None or _is_judged(step, policy):
            return
        while self._drained < flight.started:
            bucket = flight.buckets[self._drained]
            if not flight.is_landed(bucket):
                return
            self._drained += 1
            flight.wait(step, bucket)
            mine = [s for s in step.unsettled if s.bucket_index == bucket.index]
            step.unsettled = [s for s in step.unsettled if s.bucket_index != bucket.index]
            step.home.settle(mine)
            show_sparse(step, bucket)
            self.after_bucket(bucket, step.left)

    def take_rest(self, step: Step, flight: Flight) -> None:
        """Hand over the others: the step is good."""
        if self.after_bucket is not None:
            for bucket in flight.buckets[self._drained :]:
                self.after_bucket(bucket, step.left)


def _is_judged(step: Step, policy: ReducePolicy) -> bool:
    """Whether what a bucket holds is not final before the whole step has been judged."""
    is_checked = policy.tracks_unused or policy.nonfinite is not NonFinite.IGNORE
    return is_checked or step.weight is not None or bool(step.shared)
