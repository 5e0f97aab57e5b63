"""One collective of a programme: how it is called, and what must come back.

The two stand side by side for each kind. Ranks and roots are those of the group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tests.shm.contract import reference


@dataclass(frozen=True)
class Step:
    """Everything that all ranks know alike about one collective."""

    kind: str
    size: int = 0
    dtype: str = "float32"
    op: str = "SUM"
    root: int = 0
    seed: int = 0
    is_async: bool = False
    is_transposed: bool = False
    where: str = "world"


@dataclass(frozen=True)
class Expected:
    """One tensor that a rank must hold afterwards.

    Attributes:
        parts: What the ranks brought, if it was to be reduced; then ``value`` is their reduction.
    """

    value: torch.Tensor
    parts: tuple[torch.Tensor, ...] = ()


Started = tuple[Any, list[torch.Tensor]]
"""What c10d returned, and the tensors that results are written to."""


class Call:
    """A step, seen by one rank of a group."""

    def __init__(self, step: Step, group: Any) -> None:
        self.step = step
        self.group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.root = step.root % self.world
        self.common = {"group": group, "async_op": step.is_async}
        self.op = getattr(dist.ReduceOp, step.op)

    def run(self) -> Started:
        """Begin the collective."""
        return STEPS[self.step.kind][0](self)

    def expected(self) -> list[Expected]:
        """Say what must come back."""
        return STEPS[self.step.kind][1](self)

    def of(self, rank: int, part: int = 0, size: int | None = None) -> torch.Tensor:
        """Return what a rank brings (for another rank)."""
        step = self.step
        return reference.make(
            step.size if size is None else size, step.dtype, step.seed, rank, part
        )

    def mine(self) -> torch.Tensor:
        """Return what this rank brings, perhaps as a dense tensor that is not contiguous."""
        tensor = self.of(self.rank)
        if self.step.is_transposed and self.step.size % 2 == 0:
            return tensor.view(2, -1).t().contiguous().t()
        return tensor

    def empty(self, size: int | None = None) -> torch.Tensor:
        """Return room for a result."""
        return torch.zeros_like(self.of(0, 0, size))

    def reduced(self, part: int = 0) -> Expected:
        """What all ranks bring for one of them, reduced."""
        parts = tuple(self.of(rank, part) for rank in range(self.world))
        return Expected(reference.reduce(parts, self.step.op), parts)

    def everybody(self, part: int = 0) -> list[Expected]:
        """What all ranks bring for one of them, one by one."""
        return [Expected(self.of(rank, part)) for rank in range(self.world)]

    def many(self) -> list[torch.Tensor]:
        """Return what this rank brings for each rank."""
        return [self.of(self.rank, part) for part in range(self.world)]

    def uneven(self, source: int, target: int) -> int:
        """How many elements go from one rank to another."""
        return self.step.size * (source + 2 * target + 1) // (3 * self.world)


def all_reduce(call: Call) -> Started:
    tensor = call.mine()
    return dist.all_reduce(tensor, call.op, **call.common), [tensor]


def reduce(call: Call) -> Started:
    tensor = call.mine()
    work = dist.reduce(tensor, group_dst=call.root, op=call.op, **call.common)
    return work, [tensor] if call.rank == call.root else []


def broadcast(call: Call) -> Started:
    tensor = call.mine()
    return dist.broadcast(tensor, group_src=call.root, **call.common), [tensor]


def all_gather(call: Call) -> Started:
    outputs = [call.empty() for _ in range(call.world)]
    return dist.all_gather(outputs, call.of(call.rank), **call.common), outputs


def all_gather_single(call: Call) -> Started:
    output = call.empty(call.step.size * call.world)
    work = dist.all_gather_single(output, call.of(call.rank), **call.common)
    return work, list(output.chunk(call.world)) if call.step.size else [output] * call.world


def reduce_scatter(call: Call) -> Started:
    output = call.empty()
    return dist.reduce_scatter(output, call.many(), call.op, **call.common), [output]


def reduce_scatter_single(call: Call) -> Started:
    output = call.empty()
    work = dist.reduce_scatter_single(output, torch.cat(call.many()), call.op, **call.common)
    return work, [output]


def gather(call: Call) -> Started:
    is_root = call.rank == call.root
    outputs = [call.empty() for _ in range(call.world)] if is_root else None
    work = dist.gather(call.of(call.rank), outputs, group_dst=call.root, **call.common)
    return work, outputs or []


def scatter(call: Call) -> Started:
    output = call.empty()
    inputs = call.many() if call.rank == call.root else None
    return dist.scatter(output, inputs, group_src=call.root, **call.common), [output]


def all_to_all(call: Call) -> Started:
    outputs = [call.empty() for _ in range(call.world)]
    return dist.all_to_all(outputs, call.many(), **call.common), outputs


def all_to_all_single(call: Call) -> Started:
    sizes = [call.uneven(peer, call.rank) for peer in range(call.world)]
    output, inputs = call.empty(sum(sizes)), _outgoing(call)
    splits = [len(each) for each in inputs]
    work = dist.all_to_all_single(output, torch.cat(inputs), sizes, splits, **call.common)
    return work, list(output.split(sizes))


def _outgoing(call: Call) -> list[torch.Tensor]:
    sizes = [call.uneven(call.rank, peer) for peer in range(call.world)]
    return [call.of(call.rank, peer, size) for peer, size in enumerate(sizes)]


def _incoming(call: Call) -> list[Expected]:
    return [
        Expected(call.of(peer, call.rank, call.uneven(peer, call.rank)))
        for peer in range(call.world)
    ]


def all_reduce_coalesced(call: Call) -> Started:
    tensors = call.many()
    with dist._coalescing_manager(group=call.group, async_ops=call.step.is_async) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, call.op, group=call.group)
    return manager if call.step.is_async else None, tensors


def ring(call: Call) -> Started:
    """Point to point: everybody sends to the next rank."""
    output, after, before = call.empty(), call.rank + 1, call.rank - 1
    if call.world == 1:
        return None, [output.copy_(call.of(0))]
    send = dist.isend(call.of(call.rank), group=call.group, group_dst=after % call.world)
    dist.recv(output, group=call.group, group_src=before % call.world)
    send.wait()
    return None, [output]


def barrier(call: Call) -> Started:
    return dist.barrier(**call.common), []


Begin = Callable[[Call], Started]
Expect = Callable[[Call], list[Expected]]
STEPS: dict[str, tuple[Begin, Expect]] = {
    "all_reduce": (all_reduce, lambda c: [c.reduced()]),
    "reduce": (reduce, lambda c: [c.reduced()] if c.rank == c.root else []),
    "broadcast": (broadcast, lambda c: [Expected(c.of(c.root))]),
    "all_gather": (all_gather, lambda c: c.everybody()),
    "all_gather_single": (all_gather_single, lambda c: c.everybody()),
    "reduce_scatter": (reduce_scatter, lambda c: [c.reduced(c.rank)]),
    "reduce_scatter_single": (reduce_scatter_single, lambda c: [c.reduced(c.rank)]),
    "gather": (gather, lambda c: c.everybody() if c.rank == c.root else []),
    "scatter": (scatter, lambda c: [Expected(c.of(c.root, c.rank))]),
    "all_to_all": (all_to_all, lambda c: c.everybody(c.rank)),
    "all_to_all_single": (all_to_all_single, _incoming),
    "all_reduce_coalesced": (
        all_reduce_coalesced,
        lambda c: [c.reduced(part) for part in range(c.world)],
    ),
    "ring": (ring, lambda c: [Expected(c.of((c.rank - 1) % c.world))]),
    "barrier": (barrier, lambda c: []),
}
REDUCING = tuple(kind for kind in STEPS if "reduce" in kind)
NOT_COMPLEX = ("gather",)
"""What gloo does not do with complex numbers."""
TRANSPOSABLE = ("all_reduce", "reduce", "broadcast")


def check(call: Call, found: list[torch.Tensor], is_ordered: bool) -> None:
    """Compare results with what was expected.

    Args:
        call: The step.
        found: The tensors of :data:`Started`.
        is_ordered: The backend reduces in the order of ranks, and rounds as the reference does:
            the same bits. Otherwise floats may differ as much as another order makes them.
    """
    expected = call.expected()
    assert len(found) == len(expected)
    for tensor, wanted in zip(found, expected, strict=True):
        flat, value = tensor.reshape(-1), wanted.value
        assert flat.dtype == value.dtype
        if flat.dtype == torch.bool and not is_ordered:
            flat = flat.view(torch.uint8) != 0  # gloo counts: the sum of two truths is 2
        ranks = len(wanted.parts)
        if (
            not ranks
            or is_ordered
            or reference.is_reordering_exact(value.dtype, call.step.op, ranks)
        ):
            assert torch.equal(_bits(flat), _bits(value)), call.step
        else:
            parts = [_real(part) for part in wanted.parts]
            off = (_real(flat).double() - _real(value).double()).abs()
            assert bool((off <= reference.bound(parts, call.step.op)).all()), call.step


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as bytes: a NaN equals itself, and zero is not minus zero."""
    return tensor.contiguous().view(torch.uint8)
