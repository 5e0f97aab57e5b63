"""The last thing that happens to a good step: its results are shown outside.

Most slots need nothing, because their views are the gradients. Called by finish.py and handover.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.buckets import Bucket, Slot
from paceline.ddp.agree.control import ControlBlock
from paceline.ddp.reduce.step import Step


def publish(step: Step, block: ControlBlock, buckets: Sequence[Bucket]) -> None:
    """Show reduced gradients; parameters that no rank used keep what they had, bit for bit."""
    if step.absent or step.unpublished:
        _publish_dense(step, block)
    for bucket in buckets:
        if bucket.sparse_gradient is not None:
            _publish_sparse_bucket(step, block, bucket)


def _publish_dense(step: Step, block: ControlBlock) -> None:
    unused = {index for index, count in enumerate(block.used) if count == 0}
    for slot in step.absent:
        if slot.index in unused:
            _restore(step, slot)
    hidden = unused | step.left  # [Note: shared parameters] in sharing.py
    concerned = [s for s in (*step.unpublished, *step.absent) if s.index not in hidden]
    step.access.publish([slot for slot in concerned if slot.view is not None])


def _publish_sparse_bucket(step: Step, block: ControlBlock, bucket: Bucket) -> None:
    index = bucket.slots[0].index
    is_unused = bool(block.used) and block.used[index] == 0
    if is_unused or index in step.left:
        bucket.sparse_gradient = None
    else:
        publish_sparse(step, bucket)


def publish_sparse(step: Step, bucket: Bucket) -> None:
    """Let the outside show a reduced sparse gradient, once."""
    gradient, bucket.sparse_gradient = bucket.sparse_gradient, None
    if gradient is not None:
        step.access.publish_sparse(bucket.slots[0], gradient)


def _restore(step: Step, slot: Slot) -> None:
    before = step.stash.get(slot.index)
    if before is not None and slot.view is not None:
        slot.view.copy_(before)
