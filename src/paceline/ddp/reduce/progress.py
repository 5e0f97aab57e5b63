"""How far a step is: which gradients have arrived, which buckets are full and on their way.

Counts gradients, has them copied into their buckets (copy_in.py), and has buckets that are full
launched in plan order (launch.py). One for each plan, made by
:mod:`paceline.ddp.reduce.step_runner`, which says when a step begins and ends. Nothing blocks here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from paceline.buckets import Slot
from paceline.config import MissingGradients
from paceline.ddp.autograd.hooks import ReadyQueue
from paceline.ddp.reduce.arrivals import UNKNOWN_ARRIVALS, Arrivals
from paceline.ddp.reduce.bucket_set import BucketSet
from paceline.ddp.reduce.context import ReduceContext
from paceline.ddp.reduce.copy_in import BATCH_SLOTS, GradientCopier
from paceline.ddp.reduce.handover import Handover
from paceline.ddp.reduce.launch import BucketLauncher
from paceline.ddp.reduce.shard_sums import ShardSums
from paceline.ddp.reduce.sparse import copy_in_sparse
from paceline.ddp.reduce.step import Step
from paceline.torch_private.autograd import backward_id, enclosing_backward_node, queue_callback


class StepProgress:
    """The buckets of one plan, from a step's begin to its last launch."""

    def __init__(
        self,
        context: ReduceContext,
        bucket_set: BucketSet,
        arrivals: Arrivals,
        queue: ReadyQueue,
        handover: Handover,
    ) -> None:
        self._context = context
        self._policy = context.policy
        self._set = bucket_set
        self._arrivals = arrivals
        self._queue = queue
        self._handover = handover
        self._copier = GradientCopier(
            bucket_set.buckets,
            context.policy,
            context.usage,
            context.clock,
            partial(bucket_set.give_memory, context.transport) if bucket_set.is_lazy else None,
        )
        self.buckets, self.slots = bucket_set.buckets, bucket_set.slots
        self.launcher = BucketLauncher(context, bucket_set)

    def open(self, *, is_joined: bool = False) -> None:
        """Make all buckets ready for a step."""
        self._context.clock.start_backward(len(self.buckets), is_joined=is_joined)
        self.launcher.open()
        self._handover.open()
        self._arrivals.open_step(static_graph=self._policy.static_graph)
        self._set.open(self._context.transport)

    def start_copying(self, step: Step) -> None:
        """Let hooks copy gradients in as they come, if each comes once and becomes a view."""
        slots = self._set.hook_slots
        if slots is None or step.joined or not step.access.is_direct or step.factor == 0.0:
            return
        if not self._policy.batched_copy and not self._arrivals.may_repeat:
            step.hooks_copy = self._queue.start_copying(slots, step.factor)

    def take(self, step: Step, indices: Sequence[int], left: Sequence[int]) -> None:
        """Count gradients, copy in what is left, launch buckets that are full. The hot path."""
        complete, unexpected = self._arrivals.count(indices)
        for index in unexpected:
            self._fail_unexpected(step, self.slots[index])
        slots = [self.slots[index] for index in complete]
        left_slots = slots
        if len(left) < len(indices):
            is_left = set(left).__contains__
            left_slots = [slot for slot in slots if is_left(slot.index)] if left else []
        if self._copier.take(step, slots, left_slots):
            self._launch_full(step)
        self.set_due(step)

    def count_local(self, *, is_over: bool = False) -> None:
        """Count gradients that are not reduced; they stay where they are.

        Within a shard the next ones wait for its end: to be told of each costs more than many a
        gradient.
        """
        shards, taken = self._context.shards, self._queue.take()[0]
        if self._policy.tracks_unused:
            for index in taken:
                if self.slots[index].parameter.grad is not None:
                    self._context.usage.flags[index] = 1
        if shards is not None:
            shards.arrived += len(taken)
            if shards.is_open and not is_over:
                self._note_backward(shards)
            self._queue.due = UNKNOWN_ARRIVALS if shards.is_open and not is_over else 1

    def _note_backward(self, shards: ShardSums) -> None:
        """Note which backward brings a shard's gradients; its end lets another one be heard.

        Where checkpointing runs it inside of another one, as often as it likes, that one counts.
        """

        def note(*_: Any) -> None:
            shards.backwards.add((shards.shard, backward_id()))
            queue_callback(partial(self.count_local, is_over=True))

        outer = enclosing_backward_node()
        if outer is None:
            note()
        else:
            outer.register_hook(note)

    def _fail_unexpected(self, step: Step, slot: Slot) -> None:
        arrivals = self._arrivals
        arrived, expected = arrivals.arrived[slot.index], arrivals.expected[slot.index]
        step.fail_unexpected(slot, arrived, expected, is_static=arrivals.counts is not None)
        if self._policy.missing is MissingGradients.WAIT:
            assert step.failure is not None
            error = self._context.peers.error_for([step.failure], self._policy)
            self._context.on_error(error)
            raise error

    def set_due(self, step: Step) -> int:
        """Ask to be told no later than the next bucket can be full; return for how many.

        The last one may have to wait: [Note: late gradients] in reducer.py.
        """
        bucket = self.launcher.next_bucket()
        if bucket is None:
            due = 1
        elif (
            bucket is self.buckets[-1] and bucket.spec.nbytes <= self._context.transport.late_bytes
        ):
            due = UNKNOWN_ARRIVALS
        else:
            waits = step.access.keeps_gradients or step.hooks_copy
            due = bucket.pending if waits else min(BATCH_SLOTS, bucket.pending)
        self._queue.due = due
        return due

    def take_absent(self, step: Step, slots: Sequence[Slot]) -> None:
        """These gradients never come."""
        for slot in slots:
            self._arrivals.expected[slot.index] = 0
            self._queue.exclude(slot.index)
            self._copier.take_absent(step, slot)
        self._launch_full(step)

    def take_static(self, step: Step) -> None:
        """The first step of a static graph: how often gradients arrive is known only now."""
        arrived = self._arrivals.arrived
        self._arrivals.expected = list(arrived)
        for slot in self.slots:
            if not arrived[slot.index]:
                self._copier.take_absent(step, slot)
        slots = [slot for slot in self.slots if arrived[slot.index]]
        self._copier.take(step, slots, slots)

    def unused_in_static_graph(self) -> list[Slot]:
        """Return the slots that a known static graph leaves without a gradient."""
        counts = self._arrivals.counts or ()
        return [self.slots[index] for index, count in enumerate(counts) if not count]

    def missing(self) -> list[Slot]:
        """Return the slots whose gradients are still to come."""
        return [self.slots[index] for index in self._arrivals.missing()]

    def _launch_full(self, step: Step) -> None:
        self.launcher.launch_full(step)
        self._handover.take_reduced(step, self.launcher, self._policy)

    def launch_empty(self, step: Step) -> None:
        """Launch every bucket with nothing in it: this rank has joined."""
        for bucket in self.buckets:
            self._set.give_memory(self._context.transport, bucket)
            if bucket.sparse:
                copy_in_sparse(bucket, None, 0.0)
            else:
                assert bucket.gradients is not None
                bucket.gradients.zero_()
            self.launcher.launch(step, bucket)

    def keep_apart(self, step: Step, indices: Sequence[int]) -> None:
        """Leave gradients that have not arrived yet outside of the buckets until the step ends."""
        for index in indices:
            slot, arrived = self.slots[index], self._arrivals.arrived[index]
            if arrived or slot.is_shared:
                continue
            slot.is_shared = True
            step.shared.add(index)
            self._queue.exclude(index)
            if slot.view is not None and slot.parameter.grad is slot.view:
                slot.parameter.grad = slot.view.clone()

    def release(self) -> None:
        """A step is over on all ranks, and its results are shown."""
        self._set.release()

    def close(self, step: Step | None) -> None:
        """Leave nothing behind that could hold memory or disturb the next step."""
        for index in step.shared if step is not None else ():
            self.slots[index].is_shared = False
        self._queue.stop_copying()
        self._queue.clear()
        self._queue.due = 1
        self.launcher.close()
