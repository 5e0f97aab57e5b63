"""The tree that decides in which order the gradients of shards are added. Pure.

[Note: the tree]
A node is a range of shards, ``(begin, end)``. The root is all of them. A node of more than one
shard has two children: the left one has as many shards as the largest power of two that is smaller
than the node, the right one has the rest. The value of a node is left + right, rounded once. So the
tree, and with it every bit of a sum, is given by the number of shards alone.

A rank owns a range of shards that need not be a node. What it can add up by itself are the largest
nodes inside of that range, its *parts*: one if the range is a node, otherwise a few, at most
2 log2(shards). What is above the parts of all ranks is added after they have been exchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Node = tuple[int, int]
T = TypeVar("T")


def owned_shards(shards: int, rank: int, world: int) -> range:
    """The shards that a rank runs: ranges in the order of ranks, whose sizes differ by one."""
    return range(rank * shards // world, (rank + 1) * shards // world)


def split(node: Node) -> int:
    """Where the right child of a node of several shards begins."""
    begin, end = node
    return begin + (1 << ((end - begin - 1).bit_length() - 1))


class Tree:
    """The tree over so many shards.

    Attributes:
        shards: How many.
        root: All of them.
        halves: The children of the root, if it has some ([Note: the mean] in sums.py).
    """

    def __init__(self, shards: int) -> None:
        self.shards = shards
        self.root: Node = (0, shards)
        self._nodes: set[Node] = set()
        self._collect(self.root)
        middle = split(self.root) if shards > 1 else 0
        self.halves: tuple[Node, ...] = ((0, middle), (middle, shards)) if middle else ()

    def _collect(self, node: Node) -> None:
        self._nodes.add(node)
        if node[1] - node[0] > 1:
            middle = split(node)
            self._collect((node[0], middle))
            self._collect((middle, node[1]))

    def are_siblings(self, left: Node, right: Node) -> bool:
        """Whether two neighbouring nodes are the children of one."""
        both = (left[0], right[1])
        return left[1] == right[0] and both in self._nodes and split(both) == left[1]

    def parts(self, owned: range) -> list[Node]:
        """The largest nodes inside of a range, from left to right."""
        found: list[Node] = []
        for shard in owned:
            found.append((shard, shard + 1))
            while len(found) > 1 and self.are_siblings(found[-2], found[-1]):
                right = found.pop()
                found.append((found.pop()[0], right[1]))
        return found

    def combine(
        self,
        values: dict[Node, T],
        add: Callable[[T, T], T],
        scale: Callable[[T], T] | None = None,
    ) -> T:
        """Return the value of the root from those of parts that cover all shards.

        ``scale`` is applied to the children of the root, before they are added.
        """

        def value(node: Node) -> T:
            if node in values:
                found = values[node]
            else:
                middle = split(node)
                found = add(value((node[0], middle)), value((middle, node[1])))
            return scale(found) if scale is not None and node in self.halves else found

        return value(self.root)


class Shares:
    """Who owns what: a tree, cut by a number of ranks.

    Attributes:
        tree: Over all shards.
        rank: This rank.
        owned: The shards that it runs.
        parts: For each rank, the nodes that it contributes.
        memory: Of whoever exchanges parts, from one exchange to the next.
    """

    def __init__(self, shards: int, rank: int, world: int) -> None:
        self.tree = Tree(shards)
        self.rank = rank
        self.world = world
        self.owned = owned_shards(shards, rank, world)
        self.memory: dict[Any, Any] = {}
        self.parts = [self.tree.parts(owned_shards(shards, each, world)) for each in range(world)]

    @functools.cached_property
    def is_pair(self) -> bool:
        """Whether two ranks contribute one part each: any sum of the two is the tree's."""
        return self.world == 2 and all(len(parts) == 1 for parts in self.parts)

    @property
    def owns_halves(self) -> bool:
        """Whether each rank adds up its shares of the root's children, or all of it, by itself."""
        return self.world == 1 or self.is_pair

    def by_node(self, values: Sequence[Sequence[T]]) -> dict[Node, T]:
        """Name what came from each rank, in the order of its parts, by node."""
        return {
            node: value
            for parts, theirs in zip(self.parts, values, strict=True)
            for node, value in zip(parts, theirs, strict=True)
        }
