"""Copies gradients into buckets: at most once, scaled, checked.

Most gradients have been copied by the hook that told of them ([Note: warm gradients] in
autograd/hooks.py); here is the way of all others. Small gradients wait and are copied many at a
time, because a call costs more than the copy; large ones one by one, so that no second set of
gradients builds up. Where the outside keeps its set anyway, all are copied many at a time. How they
are scaled: [Note: scaling] in gradient_access.py. Called by :mod:`paceline.ddp.reduce.progress`.
Nothing raises here: trouble is noted in the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from paceline.buckets import Bucket, Slot
from paceline.config import NonFinite, ReducePolicy
from paceline.ddp.agree.nonfinite import bucket_is_finite, nonfinite_slots
from paceline.ddp.agree.reports import FailureKind
from paceline.ddp.reduce.arrivals import UsageMap
from paceline.ddp.reduce.gradient_access import copy_scaled
from paceline.ddp.reduce.sparse import copy_in_sparse
from paceline.ddp.reduce.step import Step
from paceline.observe import StepClock

BATCH_SLOTS = 128
"""Small gradients are copied in at the latest when so many wait: this bounds the extra memory."""


class GradientCopier:
    """Fills buckets; called with autograd switched off.

    Args:
        buckets: In plan order.
        policy: How gradients are treated.
        usage: Told which parameters have gradients.
        clock: Told when a bucket is full.
        attach_memory: Gives a bucket memory before anything is copied into it; None if all of them
            have memory when a step begins.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        policy: ReducePolicy,
        usage: UsageMap,
        clock: StepClock,
        attach_memory: Callable[[Bucket], None] | None,
    ) -> None:
        self._buckets = buckets
        self._policy = policy
        self._usage = usage
        self._clock = clock
        self._attach_memory = attach_memory

    def take(self, step: Step, slots: Sequence[Slot], left: Sequence[Slot]) -> bool:
        """Gradients have arrived. Return whether a bucket is full now.

        Those that are ``left`` are still to be copied in.
        """
        if left:
            self._copy_all(step, left)
        if self._policy.tracks_unused:
            self._usage.note(step.access, slots)
        full: list[Bucket] = []
        for slot in slots:
            bucket = self._buckets[slot.bucket_index]
            bucket.pending -= 1
            if not bucket.pending:
                full.append(bucket)
        for bucket in full:
            self._complete(step, bucket)
        return bool(full)

    def take_absent(self, step: Step, slot: Slot) -> None:
        """No gradient will arrive for this slot."""
        bucket = self._buckets[slot.bucket_index]
        step.absent.append(slot)
        bucket.absent += 1
        bucket.pending -= 1
        if bucket.pending == 0:
            self._complete(step, bucket)

    def _copy_all(self, step: Step, slots: Sequence[Slot]) -> None:
        all_at_once = step.access.keeps_gradients
        batch = []
        for slot in slots:
            if slot.small or (all_at_once and not slot.spec.sparse):
                batch.append(slot)
            else:
                self._copy(step, [slot])
        if batch:
            self._copy(step, batch)

    def _copy(self, step: Step, slots: Sequence[Slot]) -> None:
        self._give_memory({slot.bucket_index for slot in slots})
        try:
            if slots[0].spec.sparse:
                bucket = self._buckets[slots[0].bucket_index]
                copy_in_sparse(bucket, step.access.gradient(slots[0]), step.factor)
            elif step.factor == 0.0:
                for slot in slots:
                    slot.zero()
                step.unpublished += slots
            else:
                step.unpublished += step.access.copy_in(slots, step.factor)
        except (RuntimeError, TypeError) as error:
            step.fail_to_copy(slots, error)

    def _give_memory(self, indices: Iterable[int]) -> None:
        if self._attach_memory is not None:
            for index in indices:
                self._attach_memory(self._buckets[index])

    def _complete(self, step: Step, bucket: Bucket) -> None:
        """All gradients of a bucket are there: see to those that never come, check."""
        self._clock.ready[bucket.index] = time.perf_counter_ns()
        if bucket.absent:
            self._give_memory([bucket.index])
        for slot in step.absent:
            if slot.bucket_index == bucket.index:
                _copy_old(step, bucket, slot)
        if self._policy.nonfinite is not NonFinite.IGNORE and not bucket_is_finite(bucket):
            step.fail(FailureKind.NONFINITE, nonfinite_slots(bucket))


def _copy_old(step: Step, bucket: Bucket, slot: Slot) -> None:
    """Copy in what an absent parameter still has from earlier: it is part of the mean."""
    gradient, view = step.access.gradient(slot), slot.view
    if view is None:
        copy_in_sparse(bucket, gradient, step.factor)
        return
    if gradient is view:
        step.stash[slot.index] = view.clone()
    if gradient is None or step.factor == 0.0:
        view.zero_()
    else:
        copy_scaled([view], [gradient], step.factor)
