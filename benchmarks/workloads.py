"""The models that are measured, each with its input and its targets.

Read by every benchmark, in the caller and in the ranks: a workload travels by its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Workload:
    """One model with its batch.

    Attributes:
        title: What the table calls it.
        build: Returns the module; call it after seeding.
        batch: Returns the input, the same in every step.
        limits: The most that Paceline's step may take, as a multiple of torch's better mode: on
            up to 2 ranks, and on more ranks than cores.
        local_limit: The same as a multiple of the step without communication, on 2 ranks.
        steps: How many make a block of some 100 ms to 1 s.
    """

    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[], torch.Tensor]
    limits: tuple[float, float]
    steps: int
    local_limit: float | None = None

    def limit(self, ranks: int) -> float:
        """The target on so many ranks."""
        return self.limits[ranks > 2]


def _mlp() -> nn.Module:
    layers = [module for _ in range(6) for module in (nn.Linear(2048, 2048), nn.ReLU())]
    return nn.Sequential(*layers)


def _transformer() -> nn.Module:
    # No dropout: every variant then computes the same gradients, which is checked.
    layer = nn.TransformerEncoderLayer(d_model=256, nhead=8, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers=6, enable_nested_tensor=False)


def _many_small() -> nn.Module:
    return nn.Sequential(*[nn.Linear(32, 32) for _ in range(300)])


WORKLOADS = {
    "mlp": Workload(
        "MLP, 6 x Linear(2048), 100 MB of gradients",
        _mlp,
        lambda: torch.randn(16, 2048),
        limits=(1 / 1.7, 1 / 1.7),
        steps=2,
        local_limit=1.10,
    ),
    "transformer": Workload(
        "TransformerEncoder, d=256, 6 layers, batch 8 x 32",
        _transformer,
        lambda: torch.randn(8, 32, 256),
        limits=(1 / 1.15, 1 / 1.2),
        steps=3,
        local_limit=1.10,
    ),
    "small": Workload(
        "300 x Linear(32), 600 small parameters",
        _many_small,
        lambda: torch.randn(16, 32),
        limits=(1 / 1.2, 1.0),
        steps=8,
    ),
}


def build(name: str, *, seed: int = 0) -> nn.Module:
    """Build a workload's module, the same weights for the same seed."""
    torch.manual_seed(seed)
    return WORKLOADS[name].build()


def batch(name: str, *, seed: int) -> torch.Tensor:
    """Make a workload's input."""
    torch.manual_seed(seed)
    return WORKLOADS[name].batch()
