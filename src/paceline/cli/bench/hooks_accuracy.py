"""What a lossy hook costs in accuracy: the same short training with each hook, on several seeds.

A small network learns scikit-learn's handwritten digits. Within a seed all hooks have the same
first weights, batches and held-out images, so accuracies are compared in pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from paceline.cli.bench.harness.progress import RoundBar

TRAINED = 1200
BATCH = 60
# Start as the docs of these hooks say: send whole gradients first.
OPTIONS: dict[str, dict[str, object]] = {
    "powersgd": {"start_powerSGD_iter": 20, "matrix_approximation_rank": 2},
    "topk": {"ratio": 0.01, "warmup_steps": 20},
    "sign": {"block": 32, "start_step": 20},
}


@dataclass(frozen=True)
class Loss:
    """How many points of accuracy a hook loses against all-reduce, over seeds."""

    mean: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.mean:+.1f} ({self.least:+.1f} to {self.most:+.1f})"


def difference(mine: Sequence[float], plain: Sequence[float]) -> Loss:
    """Compare two hooks seed by seed, in points of a hundred."""
    found = [100 * (a - b) for a, b in zip(mine, plain, strict=True)]
    return Loss(sum(found) / len(found), min(found), max(found))


def train_on_rank(
    names: Sequence[str], seeds: int, epochs: int, bar: RoundBar
) -> dict[str, list[float]]:
    """Train with every hook from every seed; return the share of held-out digits that is right."""
    bar.is_shown = dist.get_rank() == 0
    found: dict[str, list[float]] = {name: [] for name in names}
    with bar:
        for seed in range(seeds):
            for name in names:
                found[name].append(_train(name, seed, epochs))
                bar.advance(name)
    return found


def _train(name: str, seed: int, epochs: int) -> float:
    from paceline import DistributedDataParallel, hooks

    images, labels = _digits()
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    order = torch.randperm(len(labels))
    train, held_out = order[:TRAINED], order[TRAINED:]
    model = DistributedDataParallel(network)
    hooks.register(model, name, **OPTIONS.get(name, {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rank, world = dist.get_rank(), dist.get_world_size()
    for epoch in range(epochs):
        shuffled = train[torch.randperm(TRAINED, generator=torch.Generator().manual_seed(epoch))]
        for batch in shuffled.view(-1, BATCH):
            mine = batch[rank::world]
            optimizer.zero_grad()
            F.cross_entropy(model(images[mine]), labels[mine]).backward()
            optimizer.step()
    with torch.no_grad():
        right = network(images[held_out]).argmax(dim=1) == labels[held_out]
    return float(right.float().mean())


def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
