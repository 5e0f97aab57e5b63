"""The last thing that happens to a good step: its results are shown outside.

Most slots need nothing, because their views are the gradients. Called by the reducer.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.buckets import Bucket, Slot
from paceline.ddp.agree.control import ControlBlock
from paceline.ddp.reduce.step import Step


def settle(step: Step, block: ControlBlock, buckets: Sequence[Bucket]) -> None:
    """Show reduced gradients; parameters that no rank used keep what they had, bit for bit."""
    if step.absent or step.unsettled:
        _settle_dense(step, block)
    for bucket in buckets:
        if bucket.sparse_gradient is not None:
            _settle_sparse(step, block, bucket)


def _settle_dense(step: Step, block: ControlBlock) -> None:
    unused = {index for index, count in enumerate(block.used) if count == 0}
    for slot in step.absent:
        if slot.index in unused:
            _restore(step, slot)
    hidden = unused | step.left  # [Note: shared parameters] in sharing.py
    concerned = [s for s in (*step.unsettled, *step.absent) if s.index not in hidden]
    step.home.settle([slot for slot in concerned if slot.view is not None])


def _settle_sparse(step: Step, block: ControlBlock, bucket: Bucket) -> None:
    index = bucket.slots[0].index
    is_unused = bool(block.used) and block.used[index] == 0
    if is_unused or index in step.left:
        bucket.sparse_gradient = None
    else:
        show_sparse(step, bucket)


def show_sparse(step: Step, bucket: Bucket) -> None:
    """Let the outside show a reduced sparse gradient, once."""
    gradient, bucket.sparse_gradient = bucket.sparse_gradient, None
    if gradient is not None:
        step.home.settle_sparse(bucket.slots[0], gradient)


def _restore(step: Step, slot: Slot) -> None:
    before = step.stash.get(slot.index)
    if before is not None and slot.view is not None:
        slot.view.copy_(before)
