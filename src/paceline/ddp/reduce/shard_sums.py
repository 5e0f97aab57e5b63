"""The gradients of this rank's shards, on their way into one reduction.

All shards of a rank but the last leave their gradients here (:meth:`ShardSums.push`). The backward
of the last one is the step that the reducer knows: when a bucket is full, what lies here is added
to it (:meth:`ShardSums.join`), and the sum over all shards begins (:meth:`ShardSums.start`). Called
by the loop over shards (features/shard_rounds.py) and by launch.py; finish.py has it scale. In
which order things are added: [Note: the tree] in shards/tree.py.

[Note: preset gradients]
Where a shard's left sibling lies on top of the stack, it becomes ``parameter.grad`` before the
shard's backward, so that autograd adds the two, as in ordinary accumulation; a + b and b + a have
the same bits. Not with weights, which come before the addition, and not where parameters may go
unused ([Note: nothing counts as zero] in shards/sums.py). Not with hooks of users that see what was
accumulated: they would see one shard, or two, as ranks own them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from paceline.buckets import Bucket, Slot
from paceline.config import NonFinite, ReducePolicy, Shards
from paceline.ddp.agree.control import ControlBlock
from paceline.ddp.agree.nonfinite import is_finite
from paceline.ddp.agree.reports import FailureKind
from paceline.ddp.reduce.sparse import empty_sparse
from paceline.ddp.reduce.step import Step, report_failure
from paceline.errors import ConfigurationError
from paceline.shards.cast import cast_all, cast_flat
from paceline.shards.parts import LaidOutParts
from paceline.shards.sums import (
    PIECE,
    SMALL,
    Addend,
    Gradients,
    PartStack,
    add_in_pieces,
    add_into,
    add_small,
)
from paceline.shards.tree import Node, Shares
from paceline.shards.tree_sum import (
    Mean,
    TreeSum,
    add_up_sparse,
    is_added_alike,
    scale_sparse,
    scratch,
    start_tree_sum,
)
from paceline.transport.late import LateReduction
from paceline.transport.sparse import add_sparse
from paceline.types import Reduction, Transport

ONE_BACKWARD = (
    "Each shard is one forward and one backward: add up the losses of a shard, and call backward() "
    "once, inside of the loop."
)


class ShardSums:
    """What the shards of one rank add up to.

    Attributes:
        shares: Who owns which shards.
        is_open: Whether a round is under way.
        has_sparse: Some parameters have sparse gradients.
        has_hooks: Users' hooks look at gradients once they are in place: each shard's by itself.
        last: What the gradients of the last backward stand for.
        weight: Of all shards of this rank so far; None: they are not weighted.
        dtype: Of all sums, if that is not the gradients' own (shards/cast.py).
        arrived: Gradients of the present shard, unless it is the last of this rank.
        shard: Which one runs.
        backwards: What has brought local gradients: the shard, and autograd's number of a backward.
        is_reduced: The step of this round is good, on all ranks.
    """

    def __init__(self, policy: Shards, rank: int, world: int) -> None:
        self.policy = policy
        self.dtype: torch.dtype | None = None
        self.has_hooks = self.has_sparse = False
        self.regroup(rank, world)

    def regroup(self, rank: int, world: int) -> None:
        """Go on as another rank, among others.

        Raises:
            ConfigurationError: If there are more ranks than shards.
        """
        if world > self.policy.count:
            raise ConfigurationError(
                f"{world} ranks cannot share {self.policy.count} shards: each needs one at least. "
                "Choose shards for the largest number of ranks that this training will have."
            )
        self.shares = Shares(self.policy.count, rank, world)
        self._stack = PartStack(self.shares.tree)
        self.close()

    def open(self) -> None:
        """Begin a round."""
        self.close()
        self.is_open = True

    def close(self) -> None:
        """Let go of everything."""
        self._stack.clear()
        self.is_open = False
        self.last: Node = (0, 0)
        self.weight: float | None = None
        self.arrived = 0
        self.shard = 0
        self.backwards: set[tuple[int, int]] = set()
        self.is_reduced = False
        self._bad: list[tuple[FailureKind, int, list[int]]] = []

    # --- shards --------------------------------------------------------------------------------

    def preset(self, shard: int, parameters: Sequence[torch.Tensor], policy: ReducePolicy) -> Node:
        """Prepare ``parameter.grad`` for a shard; return what it will stand for afterwards."""
        node = (shard, shard + 1)
        if not self._lets_autograd_add(policy) or not self._stack.completes(node):
            return node
        if node in self.shares.tree.halves:
            return node  # [Note: the mean] in shards/sums.py
        top = self._stack.value(-1)
        if any(gradient is None or gradient.is_sparse for gradient in top):
            return node
        left, gradients = self._stack.pop()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        return left[0], shard + 1

    def stays(self, node: Node, count: int, policy: ReducePolicy) -> bool:
        """Whether a shard's gradients may stay in place, for autograd to add the next one's.

        So it is with the first of two siblings ([Note: preset gradients]), if it has brought all
        ``count`` gradients and nobody wants to look at them.
        """
        following = (node[1], node[1] + 1)
        shares = self.shares
        is_first = node[1] in shares.owned and shares.tree.are_siblings(node, following)
        is_half = node in shares.tree.halves  # [Note: the mean] in shards/sums.py
        lets_autograd = self._lets_autograd_add(policy)
        is_seen = policy.nonfinite is NonFinite.IGNORE and self.arrived == count
        return is_first and not is_half and lets_autograd and is_seen

    def _lets_autograd_add(self, policy: ReducePolicy) -> bool:
        is_plain = self.weight is None and self.dtype is None and not policy.tracks_unused
        return is_plain and not self.has_hooks

    def push(
        self, node: Node, gradients: Gradients, weight: float | None, policy: ReducePolicy
    ) -> None:
        """Take the gradients of a shard, which is not the last one of this rank."""
        shard = node[1] - 1
        self._note_missing(shard, gradients, policy)
        if self.has_sparse:
            gradients = [
                each.coalesce() if each is not None and each.is_sparse else each
                for each in gradients
            ]
        if weight is not None:
            gradients = _weigh(gradients, weight)
        self._note_nonfinite(shard, gradients, policy)
        if self.dtype is not None:
            gradients = cast_all(gradients, self.dtype, 1.0 / self.policy.count)
        self._stack.push(node, gradients)

    def _note_missing(self, shard: int, gradients: Gradients, policy: ReducePolicy) -> None:
        """Note what has not come, to tell all ranks at the end of the round."""
        missing = [index for index, each in enumerate(gradients) if each is None]
        if missing and not policy.tracks_unused:
            self._bad.append((FailureKind.MISSING, shard, missing))

    def _note_nonfinite(self, shard: int, gradients: Gradients, policy: ReducePolicy) -> None:
        """The same for NaN and infinity, once weighted: a weight of zero makes nothing of them."""
        if policy.nonfinite is NonFinite.IGNORE:
            return
        bad = [i for i, each in enumerate(gradients) if each is not None and not is_finite(each)]
        if bad:
            self._bad.append((FailureKind.NONFINITE, shard, bad))

    def check_backward(self) -> None:
        """A backward is about to begin a step: a round has one."""
        if self.is_reduced:
            raise ConfigurationError(
                f"Rank {self.shares.rank}, shard {self.shard}: a second backward, after the "
                f"gradients of all shards have been averaged. {ONE_BACKWARD}"
            )

    # --- buckets -------------------------------------------------------------------------------

    def tell(self, step: Step, slots: Sequence[Slot]) -> None:
        """Let a step know what the shards before its own have brought, gradients aside."""
        if step.weight is not None:
            step.weight = self.weight
        if not self.is_open:
            detail = "a backward outside of `for micro in ddp.shards(batch)`"
            step.fail(FailureKind.BACKWARD_RAISED, [], detail)
        by_index = {slot.index: slot for slot in slots}
        for kind, shard, indices in self._bad:
            if step.failure is None or step.failure.kind is FailureKind.NONFINITE:
                named = [by_index[index] for index in indices]
                step.failure = report_failure(kind, step.rank, named, f"in shard {shard}")
                break
        self._bad = []

    def join(self, step: Step, bucket: Bucket) -> None:
        """Add to a bucket what belongs to it and lies on the stack, as far as this rank can."""
        failure = step.failure
        if failure is not None and failure.kind is FailureKind.NONFINITE and not failure.detail:
            step.failure = replace(failure, detail=f"in shard {self.last[1] - 1}")
        if bucket.sparse:
            self._join_sparse(bucket)
        elif self.dtype is None:
            self._join_dense(bucket)

    def _join_dense(self, bucket: Bucket) -> None:
        flat = bucket.gradients
        assert flat is not None
        views = [slot.view for slot in bucket.slots if slot.view is not None]
        here = self._factor if self.shares.owns_halves else 1.0
        halves, node, addends = self.shares.tree.halves, self.last, []
        if node in halves and here != 1.0:
            bucket.scale(here)
        for left in self._siblings():
            node = (left[0], node[1])
            before = here if left in halves else 1.0
            after = here if node in halves else 1.0
            addends.append(Addend(self._take(left, bucket), before, after))
        if bucket.spec.largest_numel <= SMALL:
            add_small(views, addends, flat)
        elif addends:
            add_in_pieces(views, addends, scratch(self.shares, "scaled", PIECE, flat))

    def _join_sparse(self, bucket: Bucket) -> None:
        here = self._factor if self.shares.world == 1 else 1.0
        halves, node, total = self.shares.tree.halves, self.last, bucket.sparse_gradient
        assert total is not None
        if node in halves:
            total = scale_sparse(here, total)
        for left in self._siblings():
            node = (left[0], node[1])
            value = self._take(left, bucket)[0]
            if value is not None:
                value = scale_sparse(here, value) if left in halves else value
                total = add_sparse(value, total)
            if node in halves:
                total = scale_sparse(here, total)
        bucket.sparse_gradient = total

    @property
    def _factor(self) -> float:
        """What the children of the root are multiplied with; casts and weights have their own."""
        is_sum = self.weight is None and self.dtype is None
        return 1.0 / self.policy.count if is_sum else 1.0

    def _take_siblings(self, bucket: Bucket) -> Iterator[Gradients]:
        for node in self._siblings():
            yield self._take(node, bucket)

    def start(self, transport: Transport, bucket: Bucket, *, is_last: bool) -> Reduction:
        """Begin the sum over all shards."""
        shares = self.shares
        if bucket.sparse:
            assert bucket.sparse_gradient is not None
            values = [gradients[0] for gradients in self._take_others(bucket)]
            empty = empty_sparse(bucket.slots[0].spec)
            rows = [empty if value is None else value for value in values]
            parts = [*rows, bucket.sparse_gradient.coalesce()]
            take = functools.partial(setattr, bucket, "sparse_gradient")
            factor = 1.0 if shares.world == 1 else self._factor
            add_up = functools.partial(add_up_sparse, transport, shares, parts, take, factor)
            return LateReduction(add_up)
        assert bucket.flat is not None
        if self.dtype is not None:
            return self._start_cast(transport, bucket, bucket.flat, self.dtype)
        if is_last and shares.is_pair and is_added_alike(bucket.flat):
            return transport.start_last(bucket.flat)
        make = self._lay_out(bucket, bucket.flat)
        mean = Mean(self._factor, bucket.spec.numel)
        return start_tree_sum(transport, shares, make, bucket.flat, mean)

    def _start_cast(
        self, transport: Transport, bucket: Bucket, flat: torch.Tensor, dtype: torch.dtype
    ) -> Reduction:
        """The same in a small dtype; torch adds, whatever the transport could."""
        small = cast_flat(flat, bucket.spec.numel, dtype, 1.0 / self.policy.count)
        views: Gradients = [
            small.as_strided(slot.spec.shape, slot.spec.stride, offset)
            for slot, offset in zip(bucket.slots, bucket.spec.offsets, strict=True)
        ]
        for values in self._take_siblings(bucket):
            add_into(views, values)
        shares = self.shares
        make = self._lay_out(bucket, small)

        def add_up() -> None:
            if shares.world > 1:
                TreeSum(transport, shares, make, small).add_up()
            flat.copy_(small)

        return LateReduction(add_up)

    def _siblings(self) -> list[Node]:
        """What this rank adds to the last gradients, one by one."""
        node, found = self.last, []
        for left in reversed(self._stack.nodes):
            if not self.shares.tree.are_siblings(left, node):
                break
            node = (left[0], node[1])
            found.append(left)
        return found

    def _take(self, node: Node, bucket: Bucket) -> Gradients:
        """Take a part's gradients of a bucket; the stack lets go of them.

        None at all if the part is not there, because this rank's round has failed.
        """
        if node not in self._stack.nodes:
            return [None] * len(bucket.slots)
        values = self._stack.value(self._stack.nodes.index(node))
        taken = [values[slot.index] for slot in bucket.slots]
        for slot in bucket.slots:
            values[slot.index] = None
        return taken

    def _take_others(self, bucket: Bucket) -> list[Gradients]:
        """Take what all parts but the last have of a bucket."""
        shares = self.shares
        return [self._take(node, bucket) for node in shares.parts[shares.rank][:-1]]

    def _lay_out(self, bucket: Bucket, last: torch.Tensor) -> LaidOutParts:
        take = functools.partial(self._take_others, bucket)
        return LaidOutParts(self.shares, bucket, last, take)

    # --- the end -------------------------------------------------------------------------------

    def scale(self, step: Step, block: ControlBlock, buckets: Sequence[Bucket]) -> None:
        """Turn weighted sums into means. Once, at the end: whole weights have an exact sum."""
        if step.weight is None:
            return
        weight = sum(row.weight for _, row in block.present())
        done = 1.0 if self.dtype is None else float(self.policy.count)  # a cast has divided
        for bucket in buckets:
            if weight != done:
                bucket.scale(done / weight if weight else 0.0)


def _weigh(gradients: Gradients, weight: float) -> Gradients:
    """Multiply with a weight; nothing comes of a weight of zero, not even of NaN."""
    if weight == 0.0:
        return [None] * len(gradients)
    for each in gradients:
        if each is not None:
            (each.values() if each.is_sparse else each).mul_(weight)
    return gradients
