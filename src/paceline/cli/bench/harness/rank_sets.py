"""Contenders in processes of their own that still take turns: what a training script sees.

Where several wrappers share a process, they share its malloc: what one tells it holds for all. So
each contender has a *rank set*: ranks that run it and nothing else, in a group of their own, as a
script would. All sets live at the same time and have their turns in the shuffled order of a round
([Note: interleaving] in :mod:`~.interleave`), while the others sleep at a barrier.

Called in the ranks by ``paceline bench ddp`` and ``paceline demo``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

T = TypeVar("T")


class RankSets:
    """This process's place: which set it is in, and its rank there.

    Args:
        ranks: In each set.
        names: Of the sets, in the order of global ranks.
    """

    def __init__(self, ranks: int, names: list[str]) -> None:
        number, self.rank = divmod(dist.get_rank(), ranks)
        self.name = names[number]
        self._size, self._count = ranks, len(names)
        groups = [
            dist.new_group(range(first, first + ranks))
            for first in range(0, ranks * len(names), ranks)
        ]
        self.group = groups[number]

    def on_turn(self, name: str, work: Callable[[], T]) -> T | None:
        """Do the work if it is this set's turn; called by every process, for the same name."""
        dist.barrier()  # the set before has ended
        if name != self.name:
            return None
        dist.barrier(self.group)
        return work()

    def check_same(self, values: torch.Tensor | None) -> str:
        """Compare what sets have computed; return the name of one that differs from the first.

        Args:
            values: Of this set, the same size everywhere; None if it is not compared.
        """
        everybody: list[torch.Tensor | None] = [None] * (self._size * self._count)
        dist.all_gather_object(everybody, values)
        first: torch.Tensor | None = None
        for place, other in enumerate(everybody):
            if other is None:
                continue
            first = other if first is None else first
            if first.shape != other.shape or not torch.allclose(first, other, rtol=1e-3, atol=1e-6):
                return f"rank set {place // self._size}"
        return ""


def gradient_norms(model: nn.Module) -> torch.Tensor:
    """A number for each gradient, which tells whether two models have the same ones."""
    return torch.tensor(
        [0.0 if p.grad is None else float(p.grad.double().norm()) for p in model.parameters()]
    )
