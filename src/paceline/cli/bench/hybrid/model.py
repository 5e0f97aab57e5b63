"""The model and the data of ``paceline bench hybrid``: the same for every route.

A dense network 512-256-128-64-32-8 on top of EmbeddingBags whose outputs, side by side, are its
512 inputs. Every weight and every batch follows from the seed alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from paceline.cli.bench.hybrid.plan import (
    BATCHES,
    CLASSES,
    FEATURES,
    HybridPlan,
    OptimizerName,
)

WIDTHS = (FEATURES, 256, 128, 64, 32, CLASSES)
LEARNING_RATE = 0.05
INDICES = (20, 50)
BAG = (1, 10)
TORCH_OPTIMIZERS: dict[OptimizerName, type[torch.optim.Optimizer]] = {
    OptimizerName.SGD: torch.optim.SGD,
    OptimizerName.ADAGRAD: torch.optim.Adagrad,
    OptimizerName.ROWWISE_ADAGRAD: torch.optim.Adagrad,
    OptimizerName.ADAM: torch.optim.Adam,
}
"""For the dense network on every route, and for the tables on torch's routes."""


@dataclass(frozen=True)
class Batch:
    """Indices cut into bags at the offsets, and the class of each bag."""

    indices: torch.Tensor
    offsets: torch.Tensor
    targets: torch.Tensor

    @property
    def examples(self) -> int:
        """How many bags."""
        return len(self.targets)


def dense_network(seed: int) -> nn.Sequential:
    """Build the network that every trainer has a copy of."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for width, following in pairwise(WIDTHS):
            layers += [nn.Linear(width, following), nn.ReLU()]
        return nn.Sequential(*layers[:-1])


def table_weight(plan: HybridPlan, table: int) -> torch.Tensor:
    """Return the initial rows of one table."""
    generator = _generator(plan.seed, 1, table)
    return torch.randn(plan.embeddings, plan.dim, generator=generator)


class Tables(nn.Module):
    """The tables of one server: a batch comes in, their outputs side by side go out."""

    def __init__(self, plan: HybridPlan, server: int) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag.from_pretrained(table_weight(plan, table), freeze=False, mode="sum")
            for table in plan.tables_of(server)
        )

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Look up the same bags in every table."""
        return torch.cat([bag(indices, offsets) for bag in self.bags], dim=1)


def epoch(plan: HybridPlan, trainer: int, cycle: int) -> list[Batch]:
    """Return the batches of one epoch of one trainer."""
    generator = _generator(plan.seed, 2, trainer, cycle)
    return [_batch(plan.embeddings, generator) for _ in range(BATCHES)]


def _batch(embeddings: int, generator: torch.Generator) -> Batch:
    count = _draw(INDICES, generator)
    offsets = [0]
    while (following := offsets[-1] + _draw(BAG, generator)) < count:
        offsets.append(following)
    return Batch(
        torch.randint(embeddings, (count,), generator=generator),
        torch.tensor(offsets),
        torch.randint(CLASSES, (len(offsets),), generator=generator),
    )


def _draw(bounds: tuple[int, int], generator: torch.Generator) -> int:
    low, high = bounds
    return int(torch.randint(low, high + 1, (1,), generator=generator))


def _generator(*parts: int) -> torch.Generator:
    seed = 0
    for part in parts:
        seed = seed * 1_000_003 + part
    return torch.Generator().manual_seed(seed % (1 << 62))
