"""What the tests of errors share: a model, a good step after each error, and how errors are told.

Each rank returns the errors it saw; they are looked at in the test. After every error of a step,
the same wrapper runs a good step, and its gradients are compared with single-process training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline import DistributedDataParallel as DDP

Gradients = dict[str, torch.Tensor]


class Net(nn.Module):
    """Two branches, either of which a forward may leave out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.trunk = nn.Linear(4, 4)
        self.left = nn.Linear(4, 2)
        self.right = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, branches: Sequence[str] = ("left", "right")) -> Any:
        hidden = torch.tanh(self.trunk(x))
        return sum(getattr(self, name)(hidden) for name in branches)


def batch(rank: int) -> torch.Tensor:
    return torch.full((3, 4), 0.1 * (rank + 1))


def good_step(ddp: DDP, model: Callable[..., torch.Tensor] | None = None) -> Gradients:
    """Run a step that uses everything; return its gradients."""
    ddp.zero_grad()
    (model or ddp)(batch(dist.get_rank())).square().sum().backward()
    return {name: p.grad.clone() for name, p in ddp.module.named_parameters()}


def expected(ranks: int, build: Callable[[], nn.Module] = Net) -> Gradients:
    net = build()
    for rank in range(ranks):
        (net(batch(rank)).square().sum() / ranks).backward()
    return {name: p.grad for name, p in net.named_parameters()}


def error_of(action: Callable[[], Any]) -> Exception | None:
    try:
        action()
    except Exception as error:
        return error
    return None


def mentions(error: Exception | None, *words: object) -> bool:
    """Say whether all words are in the text; show the text if not."""
    missing = [str(word) for word in words if str(word) not in str(error)]
    assert not missing, f"{missing} not in {type(error).__name__}: {error}"
    return True
