"""Adds up the parts of all ranks along the tree, slice by slice.

[Note: slices]
A flat tensor is cut into one slice for each rank. Every rank sends every other its parts of that
rank's slice; each adds up all parts of its own slice along the tree, and sends the result to
everybody. With one part per rank that is the traffic of an ordinary all-reduce. Elements do not
depend on each other, so neither cuts nor bucket sizes can change a bit.

A reduction is begun by :func:`start_tree_sum`, in the same order on all ranks.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns

import torch

from paceline.shards.tree import Shares
from paceline.transport.late import LateReduction
from paceline.transport.sparse import add_sparse, gather_sparse
from paceline.types import Reduction, Transport

PIECE_BYTES = 4 << 20
"""Of a bucket that are exchanged at once."""


Parts = Callable[[int, int], Sequence[torch.Tensor]]
"""Makes this rank's parts, flat, from left to right: their elements from one place to another.

Asked when they are needed, for one piece after the other; each is good until the next.
"""


@dataclass(frozen=True)
class Mean:
    """What makes a mean of a sum ([Note: the mean] in sums.py).

    Attributes:
        factor: The children of the root are multiplied with it.
        numel: So many elements; what is behind them is summed as it is.
    """

    factor: float
    numel: int

    def scale(self, begin: int, values: torch.Tensor) -> torch.Tensor:
        """Multiply values, in place; they begin at a place of the whole."""
        values[: max(0, self.numel - begin)].mul_(self.factor)
        return values


def start_tree_sum(
    transport: Transport,
    shares: Shares,
    parts: Parts,
    target: torch.Tensor,
    mean: Mean | None = None,
) -> Reduction:
    """Begin to replace ``target`` by the sum over all shards.

    Args:
        transport: Between the ranks.
        shares: Who brings which parts.
        parts: This rank's.
        target: Gets the sum. A part that is the only one lies there already.
        mean: What to multiply below the root; those who own children of it have done so already.
    """
    if not shares.owns_halves:
        return LateReduction(TreeSum(transport, shares, parts, target, mean).add_up)
    if shares.is_pair and not is_added_alike(target):
        return LateReduction(TreeSum(transport, shares, parts, target).add_up)
    return transport.start(target) if shares.is_pair else Done()


def is_added_alike(flat: torch.Tensor) -> bool:
    """Whether any transport adds two of these with torch's bits; small dtypes are left to torch."""
    return flat.itemsize >= 4


def scratch(shares: Shares, name: str, numel: int, like: torch.Tensor) -> torch.Tensor:
    """Return memory that is used again and again.

    New memory for each piece would break up what gradients have left, and the heap would grow.
    """
    key = (name, like.dtype, like.device)
    found: torch.Tensor | None = shares.memory.get(key)
    if found is None or found.numel() < numel:
        found = shares.memory[key] = like.new_empty(numel)
    return found[:numel]


class Done:
    """What needs no other rank."""

    def wait(self) -> None:
        """Return at once."""

    def is_done(self) -> bool:
        """It is."""
        return True

    def on_done(self, callback: Callable[[int], None]) -> None:
        """Tell at once."""
        callback(perf_counter_ns())


class TreeSum:
    """A sum over all ranks.

    A bucket goes in pieces, so that no further set of gradients builds up; while one piece is added
    up, the next one travels.
    """

    def __init__(
        self,
        transport: Transport,
        shares: Shares,
        parts: Parts,
        target: torch.Tensor,
        mean: Mean | None = None,
    ) -> None:
        self._transport = transport
        self._shares = shares
        self._parts = parts
        self._target = target
        self._mean = None if mean is None or mean.factor == 1.0 else mean

    def add_up(self) -> None:
        """Make the parts and add them up, piece by piece. Blocks."""
        make, numel = self._parts, self._target.numel()
        size = max(1, PIECE_BYTES // self._target.itemsize)
        pieces = [(begin, min(begin + size, numel)) for begin in range(0, numel, size)]
        under_way = self._send(make, pieces[0], 0)
        for number, piece in enumerate(pieces):
            present = under_way
            if number + 1 < len(pieces):
                under_way = self._send(make, pieces[number + 1], (number + 1) % 2)
            self._add_up(present, piece)

    def _cut(self, numel: int) -> list[slice]:
        """One slice of a piece for each rank."""
        world = self._shares.world
        cuts = [numel * rank // world for rank in range(world + 1)]
        return [slice(a, b) for a, b in itertools.pairwise(cuts)]

    def _send(
        self, make: Parts, piece: tuple[int, int], turn: int
    ) -> tuple[Reduction, list[torch.Tensor]]:
        """Begin to send every rank the parts of its slice; pieces in turn have memory in turn."""
        parts, shares, target = make(*piece), self._shares, self._target
        slices = self._cut(piece[1] - piece[0])
        sent = [parts[0][each] for each in slices]
        if len(parts) > 1:
            numel = (piece[1] - piece[0]) * len(parts)
            packed = scratch(shares, f"sent {turn}", numel, target)
            torch.cat([part[each] for each in slices for part in parts], out=packed)
            sent = list(packed.split([(each.stop - each.start) * len(parts) for each in slices]))
        mine = slices[shares.rank]
        counts = [len(nodes) * (mine.stop - mine.start) for nodes in shares.parts]
        outputs = scratch(shares, f"received {turn}", sum(counts), target).split(counts)
        received = [
            each.view(len(nodes), -1) for each, nodes in zip(outputs, shares.parts, strict=True)
        ]
        return self._transport.start_all_to_all(outputs, sent), received

    def _add_up(
        self, under_way: tuple[Reduction, list[torch.Tensor]], piece: tuple[int, int]
    ) -> None:
        """Add up this rank's slice along the tree, and give it to all."""
        exchange, received = under_way
        exchange.wait()
        values = self._shares.by_node([list(each.unbind(0)) for each in received])
        (begin, end), mean = piece, self._mean
        slices = self._cut(end - begin)
        begin += slices[self._shares.rank].start
        scale = None if mean is None else functools.partial(mean.scale, begin)
        mine = self._shares.tree.combine(values, torch.Tensor.add_, scale)
        outputs = [self._target[piece[0] : end][each] for each in slices]
        self._transport.start_all_to_all(outputs, [mine] * self._shares.world).wait()


def add_up_sparse(
    transport: Transport,
    shares: Shares,
    parts: list[torch.Tensor],
    take: Callable[[torch.Tensor], None],
    factor: float,
) -> None:
    """The same for sparse gradients: all ranks get all rows, and add them up alike.

    Args:
        transport: Between the ranks.
        shares: Who brings which parts.
        parts: This rank's, coalesced.
        take: Is given the sum.
        factor: The children of the root are multiplied with it.
    """
    everything = [parts]
    if shares.world > 1:
        counts = [len(nodes) for nodes in shares.parts]
        everything = gather_sparse(transport.messages, parts, counts)
    scale = None if factor == 1.0 else functools.partial(scale_sparse, factor)
    take(shares.tree.combine(shares.by_node(everything), add_sparse, scale))


def scale_sparse(factor: float, tensor: torch.Tensor) -> torch.Tensor:
    """Multiply the rows that are there."""
    return tensor if factor == 1.0 else tensor.coalesce() * factor
