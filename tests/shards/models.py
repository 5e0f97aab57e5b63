"""The models that trainings over shards have, each with one difficulty."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline


class Small(nn.Module):
    """A CNN with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.out = nn.Linear(4 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.conv(x.view(-1, 1, 4, 4))))
        return self.out(y.flatten(1))


class Synced(nn.Module):
    """SyncBatchNorm over all shards, twice, beside a BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = paceline.nn.SyncBatchNorm(4, momentum=None)
        self.again = nn.Conv2d(4, 4, 3, padding=1)
        self.own = nn.BatchNorm2d(4)
        self.dropout = nn.Dropout(0.2)
        self.out = nn.Linear(4 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.conv(x.view(-1, 1, 4, 4))))
        y = self.own(y + self.dropout(self.norm(self.again(y))))
        return self.out(y.flatten(1))


class SyncedWords(nn.Module):
    """The same with an embedding whose gradients are sparse, and branches that go unused."""

    def __init__(self) -> None:
        super().__init__()
        self.words = Words()
        self.norm = paceline.nn.SyncBatchNorm(5)
        self.gated = Gated()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.words(x)) + self.gated(x)


class SyncedFirst(nn.Module):
    """A SyncBatchNorm whose input has a gradient in some shards only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.norm = paceline.nn.SyncBatchNorm(16)
        self.out = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.first(x) if x[0, 0].item() > 0 else x))


class Words(nn.Module):
    """Embeddings with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(50, 6, mode="mean", sparse=True)
        self.out = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.table((x.abs() * 7).long() % 50))


class Transformer(nn.Module):
    """One encoder layer, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.2, batch_first=True)
        self.out = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x.view(-1, 2, 8)).mean(1))


class Gated(nn.Module):
    """Two branches, of which the inputs choose one; randomness of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(16, 5) for _ in range(3))
        self.common = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        noise = random.random() + float(np.random.rand()) + torch.rand(()).item()
        choice = int(x[0, 0] > 0) if float(x[0, 1]) < 0.5 else 2
        return self.common(x) * noise + self.branches[choice](x)


class Oddities(nn.Module):
    """Parameters of other layouts and dtypes, and buffers of all kinds, written to and replaced."""

    mean: Tensor
    rounds: Tensor
    seen: Tensor
    coarse: Tensor
    phase: Tensor
    cache: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(5, 64).t())
        self.complex = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("rounds", torch.zeros((), dtype=torch.int32))
        self.register_buffer("seen", torch.zeros(16, dtype=torch.bool))
        self.register_buffer("coarse", torch.ones(3, dtype=torch.float16))
        self.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("cache", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self._change_buffers(x.detach())
        images = (x - self.mean).view(-1, 1, 4, 4).to(memory_format=torch.channels_last)
        y = F.relu(self.conv(images)).flatten(1) @ self.turned
        turned = y * self.complex * self.phase[0]
        return turned.real + turned.imag * self.coarse.float().mean() + (self.cache or 0.0)

    def _change_buffers(self, x: Tensor) -> None:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.rounds = self.rounds + 1
        self.seen |= (x > 1).any(0)
        self.coarse += x.std().half() / 100
        self.phase = self.phase * torch.polar(torch.ones(2), x.mean() / 10)
        if self.cache is None:
            self.cache = torch.full((), 0.5)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 20), nn.Tanh(), nn.Dropout(0.3), nn.Linear(20, 5))
