"""What the tests of faults share: a model, faults to put into it, and a good step afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline import DistributedDataParallel as DDP
from paceline.testing import run_ranks

Gradients = dict[str, torch.Tensor]


class Boom(Exception):
    """The fault."""


class Net(nn.Module):
    """Gradients arrive from `last` to `first`. With a buffer, if asked for."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(4, 4)
        self.middle = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.fault: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.fault()
        return self.last(torch.tanh(self.middle(self.norm(self.first(x)))))


def run_faulty(ranks: int, run: Callable[[], Any]) -> list[Any]:
    """Give up early: what hangs here hangs for ever."""
    return run_ranks(ranks, run)


def batch(rank: int, requires_grad: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(3, 4, generator=generator).requires_grad_(requires_grad)


def gradients(ddp: DDP) -> Gradients:
    return {name: p.grad.clone() for name, p in ddp.module.named_parameters()}


def good_step(ddp: DDP) -> Gradients:
    ddp.zero_grad()
    ddp(batch(dist.get_rank())).square().sum().backward()
    return gradients(ddp)


def expected(ranks: int, norm: bool = False) -> Gradients:
    net = Net(norm)
    for rank in range(ranks):
        (net(batch(rank)).square().sum() / ranks).backward()
    return {name: p.grad for name, p in net.named_parameters()}


def wrap(warm: int, **options: Any) -> DDP:
    """One bucket per parameter, once `warm` good steps have been run."""
    ddp = DDP(Net(options.pop("norm", False)), bucket_cap_mb=1e-6, **options)
    for _ in range(warm):
        good_step(ddp)
    ddp.zero_grad()
    return ddp


def raise_in_backward(ddp: DDP, where: str, error: BaseException) -> list[str]:
    """Let the gradient of one parameter raise, once. The list says whether it has."""
    fired: list[str] = []

    def hook(gradient: torch.Tensor) -> None:
        if not fired:
            fired.append(where)
            raise error

    ddp.module.get_parameter(where).register_hook(hook)
    return fired


def caught(action: Callable[[], Any]) -> BaseException | None:
    try:
        action()
    except BaseException as error:
        return error
    return None


def step_with_fault(ddp: DDP, where: str, on: tuple[int, ...], error: BaseException) -> Any:
    """Run a step that raises on some ranks; return what each rank caught, checked to have fired."""
    rank = dist.get_rank()
    fired = raise_in_backward(ddp, where, error) if rank in on else [where]
    found = caught(lambda: ddp(batch(rank)).square().sum().backward())
    assert fired == [where]
    return found
