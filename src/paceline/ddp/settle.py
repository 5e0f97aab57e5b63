"""The last thing that happens to a good step: its results are shown outside.

Most slots need nothing, because their views are the gradients. Called by the reducer.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.buckets import Bucket, Slot
from paceline.ddp.control import ControlBlock
from paceline.ddp.step import Step


def settle(step: Step, block: ControlBlock, buckets: Sequence[Bucket]) -> None:
    """Show reduced gradients; parameters that no rank used keep what they had, bit for bit."""
    unused = {index for index, count in enumerate(block.used) if count == 0}
    for slot in step.absent:
        if slot.index in unused:
            _restore(step, slot)
    concerned = [s for s in (*step.unsettled, *step.absent) if s.index not in unused]
    step.home.settle([slot for slot in concerned if slot.view is not None])
    for bucket in buckets:
        gradient, bucket.sparse_gradient = bucket.sparse_gradient, None
        if gradient is not None and bucket.slots[0].index not in unused:
            step.home.settle_sparse(bucket.slots[0], gradient)


def _restore(step: Step, slot: Slot) -> None:
    before = step.stash.get(slot.index)
    if before is not None and slot.view is not None:
        slot.view.copy_(before)
