"""Trainings over shards that are drawn at random: the model, settings, the transport."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import paceline
from tests.shards.trainings import Case


@dataclass(frozen=True)
class Drawn:
    """A training.

    Attributes:
        layers: What the model is made of.
        shards: How many.
        micro: Samples in each.
        cap: Of a bucket, in MiB.
        optimizer: Its name.
        rounds: For each step.
        is_weighted: Shards have weights.
        transport: What gradients travel over.
    """

    layers: tuple[str, ...]
    shards: int
    micro: int
    cap: float
    optimizer: str
    rounds: int
    is_weighted: bool
    transport: str

    def case(self) -> Case:
        """The same as the other tests have it."""
        has_sync = "sync" in self.layers
        return Case(
            functools.partial(Model, self.layers),
            self._optimizers,
            {"bucket_cap_mb": self.cap, "find_unused_parameters": "maybe" in self.layers},
            accumulate=self.rounds,
            is_weighted=self.is_weighted and not has_sync,
            shards=self.shards,
            in_turns=has_sync,
            micro=self.micro,
        )

    def _optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        return [getattr(torch.optim, self.optimizer)(model.parameters(), lr=0.05)]


class Convolution(nn.Module):
    """Over the columns of a row, with two channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.unsqueeze(1)).mean(1)


class Attention(nn.Module):
    """Every column of a row looks at all others."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(1, 4)
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.widen(x.unsqueeze(-1))
        found: Tensor = self.attention(tokens, tokens, tokens, need_weights=False)[0]
        return found.mean(-1)


class Model(nn.Module):
    """Some layers in a row."""

    def __init__(self, layers: tuple[str, ...]) -> None:
        super().__init__()
        self.kinds = layers
        made: list[nn.Module] = []
        width = 16
        for index, kind in enumerate(layers):
            if kind in ("linear", "maybe"):
                made.append(nn.Linear(width, width := 5 + 3 * index))
            elif kind == "norm":
                made.append(nn.BatchNorm1d(width))
            elif kind == "sync":
                made.append(paceline.nn.SyncBatchNorm(width))
            elif kind == "words":
                made.append(nn.Embedding(30, width, sparse=True))
            elif kind == "conv":
                made.append(Convolution())
            elif kind == "attention":
                made.append(Attention())
            else:
                made.append(nn.Dropout(0.2))
        self.layers = nn.ModuleList(made)
        self.last = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        choice = bool(x[0, 0] > 0)
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            if kind == "words":
                x = x + layer((x[:, 0].abs() * 20).long() % 30)
            elif kind == "maybe" and choice:
                x = F.pad(x, (0, layer.out_features - x.shape[1])) if (
                    layer.out_features >= x.shape[1]
                ) else x[:, : layer.out_features]  # fmt: skip
            else:
                x = torch.tanh(layer(x))
        return self.last(x)


@st.composite
def trainings(draw: st.DrawFn, least: int = 1) -> Drawn:
    """Draw one with so many shards at least."""
    kinds = st.sampled_from(
        ["linear", "norm", "sync", "dropout", "words", "maybe", "conv", "attention"]
    )
    layers = tuple(draw(st.lists(kinds, min_size=1, max_size=4)))
    adaptive = "Adagrad" if "words" in layers else "AdamW"  # which refuses sparse gradients
    return Drawn(
        shards=draw(st.integers(least, 9)),
        layers=layers,
        micro=draw(st.integers(2, 3)),
        cap=draw(st.sampled_from([0.0001, 0.001, 25.0])),
        optimizer=draw(st.sampled_from(["SGD", adaptive])),
        rounds=draw(st.integers(1, 2)),
        is_weighted=draw(st.booleans()),
        transport=draw(st.sampled_from(["auto", "c10d"])),
    )
