"""What the tests of lifetimes share: modules that can be seen to go, no collector."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

Gradients = dict[str, torch.Tensor]


VARIANTS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": False, "bucket_cap_mb": 1e-6},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"nonfinite": "skip"},
]


def build() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def step(model: nn.Module, scale: float = 1.0) -> None:
    x = torch.full((3, 4), 0.1 * (1 + dist.get_rank()))
    (model(x).square().sum() * scale).backward()


def gradients(module: nn.Module) -> Gradients:
    return {name: p.grad.clone() for name, p in module.named_parameters()}


def expected(ranks: list[int]) -> Gradients:
    """The mean over the losses of these ranks."""
    net = build()
    for rank in ranks:
        (net(torch.full((3, 4), 0.1 * (1 + rank))).square().sum() / len(ranks)).backward()
    return gradients(net)


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """What a cycle keeps alive stays alive in here."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Marker:
    """Sits in a graph and dies with it."""


class Marked(torch.autograd.Function):
    """The identity; its node in the graph holds a marker."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, markers: list[weakref.ref[Marker]]) -> torch.Tensor:
        ctx.marker = Marker()
        markers.append(weakref.ref(ctx.marker))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient, None


class MarkedNet(nn.Module):
    """Has a marker in every graph, and a branch that may go unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.spare = nn.Linear(8, 2)
        self.markers: list[weakref.ref[Marker]] = []

    def forward(self, x: torch.Tensor, spare: bool = True) -> torch.Tensor:
        hidden = Marked.apply(self.first(x), self.markers)
        return self.last(hidden) + (self.spare(hidden) if spare else 0)

    def alive(self) -> int:
        return sum(marker() is not None for marker in self.markers)
