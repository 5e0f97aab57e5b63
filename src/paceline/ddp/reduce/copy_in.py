"""Brings gradients into buckets: copied at most once, scaled, checked.

Most gradients have been brought in by the hook that told of them ([Note: warm gradients] in
taps.py); here is the way of all others. Small gradients wait and are copied many at a time, because
a call costs more than the copy; large ones are copied and scaled in one pass, a few at a time, so
that no second set of gradients builds up. Where the outside keeps its set anyway, all are copied
many at a time. Nothing raises here: trouble is noted in the step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from paceline.buckets import Bucket, Slot
from paceline.config import NonFinite, ReducePolicy
from paceline.ddp.agree.nonfinite import bucket_is_finite, nonfinite_slots
from paceline.ddp.agree.reports import FailureKind
from paceline.ddp.reduce.sparse import collect_sparse
from paceline.ddp.reduce.step import Step
from paceline.ddp.reduce.usage import UsageMap
from paceline.observe import StepClock

BATCH_SLOTS = 128
"""Small gradients are brought in at the latest when so many wait: this bounds the extra memory."""


class Filler:
    """Fills the buckets of one reducer, which calls it with autograd switched off."""

    def __init__(self, policy: ReducePolicy, usage: UsageMap, clock: StepClock) -> None:
        self._policy = policy
        self._usage = usage
        self._clock = clock

    def take(
        self,
        step: Step,
        buckets: Sequence[Bucket],
        slots: Sequence[Slot],
        left: Sequence[Slot],
    ) -> bool:
        """Gradients have arrived. Return whether a bucket is full now, and filled.

        Those that are ``left`` are still to be brought in.
        """
        if left:
            batch = self._take_large(step, buckets, left)
            if batch:
                self._take_batch(step, buckets, batch)
        if self._policy.tracks_unused:
            self._usage.note(step.home, slots)
        full: list[Bucket] = []
        for slot in slots:
            bucket = buckets[slot.bucket_index]
            bucket.pending -= 1
            if not bucket.pending:
                full.append(bucket)
        for bucket in full:
            self.fill(step, bucket)
        return bool(full)

    def _take_large(
        self, step: Step, buckets: Sequence[Bucket], slots: Sequence[Slot]
    ) -> list[Slot]:
        """Bring in what goes one by one, scaled; return what goes with others."""
        all_at_once = step.home.keeps_gradients
        batch = []
        for slot in slots:
            if slot.small or (all_at_once and not slot.spec.sparse):
                batch.append(slot)
            else:
                self._take_single(step, buckets[slot.bucket_index], slot)
        return batch

    def take_absent(self, step: Step, bucket: Bucket, slot: Slot) -> None:
        """No gradient will arrive for this slot."""
        step.absent.append(slot)
        bucket.absent += 1
        bucket.pending -= 1
        if bucket.pending == 0:
            self.fill(step, bucket)

    def fill(self, step: Step, bucket: Bucket) -> None:
        """All gradients of a bucket are there: scale, check."""
        self._clock.ready[bucket.index] = time.perf_counter_ns()
        if step.absent:
            self._take_leftovers(step, bucket)
        if not bucket.sparse and step.factor not in (0.0, 1.0):
            self._scale(step, bucket)
        if self._policy.nonfinite is not NonFinite.IGNORE and not bucket_is_finite(bucket):
            step.fail(FailureKind.NONFINITE, nonfinite_slots(bucket))

    def _scale(self, step: Step, bucket: Bucket) -> None:
        """Scale what was not scaled as it came."""
        if step.home.keeps_gradients:
            bucket.scale(step.factor)
        elif not _is_scaled_at_once(step, bucket):
            bucket.scale_small(step.factor)

    def _take_single(self, step: Step, bucket: Bucket, slot: Slot) -> None:
        try:
            if bucket.sparse:
                collect_sparse(bucket, step.home.gradient(slot), step.factor)
            elif step.factor == 0.0:
                step.unsettled += _take_nothing([slot])
            elif step.factor == 1.0:
                step.unsettled += step.home.collect([slot])
            elif not step.home.collect_scaled(slot, step.factor):
                step.unsettled.append(slot)
        except (RuntimeError, TypeError) as error:
            step.fail_to_copy([slot], error)

    def _take_batch(self, step: Step, buckets: Sequence[Bucket], slots: Sequence[Slot]) -> None:
        try:
            if step.factor == 0.0:
                step.unsettled += _take_nothing(slots)
            else:
                step.unsettled += step.home.collect(slots)
                for slot in slots if step.is_brought_in else ():
                    at_once = _is_scaled_at_once(step, buckets[slot.bucket_index])
                    if at_once and slot.view is not None:
                        slot.view.mul_(step.factor)
        except (RuntimeError, TypeError) as error:
            step.fail_to_copy(slots, error)

    def _take_leftovers(self, step: Step, bucket: Bucket) -> None:
        """Bring in what absent parameters still have from earlier: it is part of the mean."""
        for slot in step.absent:
            if slot.bucket_index != bucket.index:
                continue
            gradient = step.home.gradient(slot)
            view = slot.view
            if view is None:
                collect_sparse(bucket, gradient, step.factor)
                continue
            if gradient is view:
                step.stash[slot.index] = view.clone()
            elif gradient is not None:
                view.copy_(gradient)
            else:
                view.zero_()
            at_once = not slot.small or _is_scaled_at_once(step, bucket)
            if step.factor == 0.0:
                view.zero_()
            elif at_once and not step.home.keeps_gradients:
                view.mul_(step.factor)


def _is_scaled_at_once(step: Step, bucket: Bucket) -> bool:
    """Whether small gradients of a bucket are scaled one by one, too, and not when it is full."""
    return step.is_brought_in and bucket.is_plain


def _take_nothing(slots: Sequence[Slot]) -> list[Slot]:
    """A weight of zero: the gradient is not even read, for it may be NaN."""
    for slot in slots:
        slot.zero()
    return list(slots)
