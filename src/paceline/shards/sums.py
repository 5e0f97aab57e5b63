"""Adds up what shards bring, as far as one rank can: a stack of parts of the tree.

[Note: how a rank adds up]
Shards come in order. Each is put on the stack; while the two on top are siblings in the tree, the
right one is added to the left one. So a rank holds at most log2 of its shards + 1 sets of
gradients, and does as many additions as ordinary accumulation.

[Note: nothing counts as zero]
A shard that does not use a parameter brings None for it. Wherever it meets a value, it counts as
+0.0: 0.0 + -0.0 is 0.0, so to leave the addition out would keep a sign that a rank which adds
buckets full of zeros has lost.

[Note: the mean]
The mean is the sum times 1 / shards. It is taken below the root: its two children are multiplied,
then added. Whoever adds up a child has it in a cache; two ranks that own one each exchange what is
scaled already. To multiply the sum instead would be a further pass over all gradients. Whoever
multiplies does it as :func:`scale_all` or ``mul_``, which round alike in every dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.shards.tree import Node, Tree
from paceline.transport.sparse import add_sparse

Gradients = list[torch.Tensor | None]


def add_into(left: Gradients, right: Sequence[torch.Tensor | None]) -> None:
    """Let ``left`` hold left + right, in its own memory where it has some."""
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for index, (mine, other) in enumerate(zip(left, right, strict=True)):
        if mine is None or other is None:
            alone = other if mine is None else mine
            left[index] = None if alone is None else add_nothing(alone)
        elif mine.is_sparse or other.is_sparse:
            left[index] = add_sparse(mine, other)
        else:
            targets.append(mine)
            sources.append(other)
    if targets:
        torch._foreach_add_(targets, sources)


SMALL = 1 << 16
"""Elements of a tensor that is added as a whole, among others: a call costs more than its sum."""

PIECE = 1 << 18
"""Elements that stay in a cache from one operation to the next, and keep all threads busy."""


@dataclass(frozen=True)
class Addend:
    """What is added to gradients: they become (gradients + values * before) * after.

    Each operation is rounded for itself.
    """

    values: Gradients
    before: float
    after: float


def add_small(left: Sequence[torch.Tensor], addends: Sequence[Addend], whole: torch.Tensor) -> None:
    """Add to small tensors, all of which lie in ``whole``."""
    for each in addends:
        _add(left, each.values, each.before)
        if each.after != 1.0:
            whole.mul_(each.after)


def add_in_pieces(
    left: Sequence[torch.Tensor], addends: Sequence[Addend], memory: torch.Tensor
) -> None:
    """Add to tensors some of which are large: piece by piece, all addends at once.

    Args:
        left: They hold the sums afterwards.
        addends: Added from left to right.
        memory: For one piece.
    """
    lines: list[int] = []
    rest: list[int] = []
    for index, mine in enumerate(left):
        others = [each.values[index] for each in addends]
        is_line = all(each is None or each.is_contiguous() for each in (mine, *others))
        (lines if is_line and mine.numel() > SMALL else rest).append(index)
    for each in addends:
        targets = [left[index] for index in rest]
        _add(targets, [each.values[index] for index in rest], each.before)
        scale_all(targets, each.after)
    for index in lines:
        _add_to_line(left[index], index, addends, memory)


def _add_to_line(
    target: torch.Tensor, index: int, addends: Sequence[Addend], memory: torch.Tensor
) -> None:
    """Add to one large tensor, which is the ``index``-th of all."""
    values = [each.values[index] for each in addends]
    sources = [None if value is None else value.view(-1).split(PIECE) for value in values]
    for number, piece in enumerate(target.view(-1).split(PIECE)):
        for each, source in zip(addends, sources, strict=True):
            if source is None:
                add_nothing(piece)
            elif each.before == 1.0:
                piece.add_(source[number])
            else:
                piece.add_(torch.mul(source[number], each.before, out=memory[: piece.numel()]))
            if each.after != 1.0:
                piece.mul_(each.after)


def _add(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor | None], before: float) -> None:
    """Let ``left`` hold left + right * before."""
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for mine, other in zip(left, right, strict=True):
        if other is None:
            add_nothing(mine)
        else:
            targets.append(mine)
            sources.append(other)
    if targets:
        scale_all(sources, before)
        torch._foreach_add_(targets, sources)


def scale_all(tensors: Sequence[torch.Tensor], factor: float) -> None:
    """Multiply in place; each element is rounded once, as by ``mul_``.

    On the CPU, ``_foreach_mul_`` rounds the factor to float16 or bfloat16 first.
    """
    if factor == 1.0 or not tensors:
        return
    if all(each.itemsize >= 4 or not each.is_cpu for each in tensors):
        torch._foreach_mul_(list(tensors), factor)
        return
    for each in tensors:
        each.mul_(factor)


def add_nothing(tensor: torch.Tensor) -> torch.Tensor:
    """Add +0.0 in place: see [Note: nothing counts as zero]. Rows that are not there stay so."""
    if not tensor.is_sparse:
        tensor.add_(0.0)
    return tensor


class PartStack:
    """The parts that a rank has so far.

    Attributes:
        nodes: Which shards each of them stands for, from left to right.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self.nodes: list[Node] = []
        self._values: list[Gradients] = []

    def __len__(self) -> int:
        return len(self.nodes)

    def push(self, node: Node, value: Gradients) -> None:
        """Add what a node brings; it lies to the right of all others. Takes the value over."""
        while self.nodes and self._tree.are_siblings(self.nodes[-1], node):
            left, total = self.pop()
            add_into(total, value)
            node, value = (left[0], node[1]), total
        self.nodes.append(node)
        self._values.append(value)

    def pop(self) -> tuple[Node, Gradients]:
        """Take the rightmost part away."""
        return self.nodes.pop(), self._values.pop()

    def completes(self, node: Node) -> bool:
        """Whether the rightmost part is the left sibling of a node."""
        return bool(self.nodes) and self._tree.are_siblings(self.nodes[-1], node)

    def value(self, position: int) -> Gradients:
        """The value of a part."""
        return self._values[position]

    def clear(self) -> None:
        """Let go of everything."""
        self.nodes.clear()
        self._values.clear()
