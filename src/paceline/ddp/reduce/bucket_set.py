"""All buckets of one plan: made for it, given memory, opened for a step.

Made by step_runner.py, which replaces the whole set when buckets are cut anew. Must not know about
steps, hooks or the order in which gradients arrive.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.buckets import SMALL_BYTES, UNLIMITED, Bucket, BucketPlan, Slot
from paceline.config import GradientViews, ReducePolicy
from paceline.ddp.agree.control import ControlLayout
from paceline.types import Transport

TINY_BYTES = 1 << 20
"""A second set of gradients up to this size is no memory to save."""


class BucketSet:
    """The buckets of a plan; memory comes with the next backward, when the old is free.

    Attributes:
        plan: How parameters are cut into buckets.
        layout: Of the control block, which rides behind the last bucket.
        is_tiny: All gradients together are so small that they are copied at once.
        buckets: In plan order.
        slots: In the order of the parameters.
        hook_slots: The same, with None for those that no hook can copy; None if that is all.
        is_lazy: Buckets get memory one by one, when gradients are to be copied in.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[torch.Tensor],
        policy: ReducePolicy,
        world: int,
    ) -> None:
        self.plan = plan
        self._keeps_held_memory = policy.views is GradientViews.SAFE
        self.is_lazy = policy.lazy_buckets
        tracked = len(parameters) if policy.tracks_unused else 0
        self.layout = ControlLayout(
            world, len(plan.buckets), tracked, has_digests=bool(policy.check_every)
        )
        self.is_tiny = sum(spec.nbytes for spec in plan.buckets) <= TINY_BYTES
        small_bytes = UNLIMITED if policy.batched_copy or self.is_tiny else SMALL_BYTES
        last = len(plan.buckets) - 1
        self.buckets = [
            Bucket(
                index,
                spec,
                parameters,
                trailer_numel=self.layout.numel if index == last else 0,
                small_bytes=small_bytes,
            )
            for index, spec in enumerate(plan.buckets)
        ]
        by_index = {slot.index: slot for bucket in self.buckets for slot in bucket.slots}
        self.slots = [by_index[index] for index in range(len(parameters))]
        copied = [s if self.buckets[s.bucket_index].hooks_can_copy else None for s in self.slots]
        can_copy = any(copied) and not self.is_lazy
        self.hook_slots: list[Slot | None] | None = copied if can_copy else None

    def open(self, transport: Transport) -> None:
        """Make every bucket ready for a step."""
        for bucket in self.buckets:
            if not self.is_lazy or bucket.flat is not None:  # of a step that failed
                self._attach_memory(bucket, transport)
            bucket.open()

    def give_memory(self, transport: Transport, bucket: Bucket) -> None:
        """Give a bucket memory if it has none yet in this step."""
        if bucket.flat is None:
            self._attach_memory(bucket, transport)

    def release(self) -> None:
        """A step is over on all ranks: keep no memory but what gradients are views of."""
        if self.is_lazy:
            for bucket in self.buckets:
                bucket.detach()

    def _attach_memory(self, bucket: Bucket, transport: Transport) -> None:
        """Give a bucket memory, or new memory if somebody still holds the old."""
        if bucket.sparse:
            return
        if bucket.flat is not None:
            if not self._keeps_held_memory or not bucket.is_held():
                return
            bucket.detach()
        spec = bucket.spec
        bucket.attach(transport.allocate(bucket.total_numel, spec.dtype, spec.device))
