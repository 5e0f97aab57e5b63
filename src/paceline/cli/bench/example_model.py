"""An example for ``paceline bench ddp --model MODULE:FUNCTION``; copy it and put your model in.

``make()`` returns the model and a function that makes the inputs of one step. See docs/bench.md.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Classifier(nn.Module):
    """A small network whose forward returns its loss, as many training scripts have it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
        self.head = nn.Linear(512, 10)

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a batch."""
        return F.cross_entropy(self.head(self.body(features)), labels)


def make() -> tuple[nn.Module, object]:
    """Return the model, and a function that makes a batch: here a tuple, for ``model(*batch)``."""

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(32, 256), torch.randint(10, (32,))

    return Classifier(), batch
