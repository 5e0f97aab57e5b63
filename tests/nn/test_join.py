"""Uneven inputs: a rank that has run out of batches does not stop the others' normalisation."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.nn import SyncBatchNorm
from paceline.testing import run_ranks

LR = 0.1


class Net(nn.Module):
    """Two layers, of which one is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6)
        self.middle = nn.Linear(6, 6)
        self.last = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)).tanh()
        return self.last(self.norm(self.middle(x)).tanh())


def build() -> Net:
    torch.manual_seed(3)
    return Net().double()


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * rank + step)
    return torch.randn(4 + rank, 5, dtype=torch.double, generator=generator)


def update(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter -= LR * parameter.grad


def train_rank(counts: list[int], epochs: int) -> dict[str, torch.Tensor]:
    net = SyncBatchNorm.convert_sync_batchnorm(build())
    model = paceline.DistributedDataParallel(net)
    rank = dist.get_rank()
    for _ in range(epochs):
        with model.join(divide_by_initial_world_size=False):
            for step in range(counts[rank]):
                model.zero_grad()
                model(batch(rank, step)).square().sum().backward()
                update(model)
    assert all(m._exchange is None for m in net.modules() if isinstance(m, SyncBatchNorm))
    return {name: value.clone() for name, value in net.state_dict().items()}


def train_alone(counts: list[int], epochs: int) -> dict[str, torch.Tensor]:
    net = build()
    for _ in range(epochs):
        for step in range(max(counts)):
            active = [rank for rank, count in enumerate(counts) if count > step]
            net.zero_grad()
            loss = net(torch.cat([batch(rank, step) for rank in active])).square().sum()
            (loss / len(active)).backward()
            update(net)
    return dict(copy.deepcopy(net.state_dict()))


@pytest.mark.parametrize("counts", [[2, 4], [4, 2], [3, 3], [1, 4, 2]])
def test_equals_one_process_on_the_ranks_that_still_have_inputs(counts: list[int]) -> None:
    expected = train_alone(counts, epochs=2)
    for state in run_ranks(len(counts), train_rank, counts, 2):
        torch.testing.assert_close(state, expected, rtol=1e-8, atol=1e-8)


def test_a_rank_without_any_input() -> None:
    """It knows of each layer once; that one is used twice it could not know."""

    def train() -> float:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3), nn.BatchNorm1d(3))
        model = paceline.DistributedDataParallel(SyncBatchNorm.convert_sync_batchnorm(net))
        with model.join():
            for step in range(3 * dist.get_rank()):
                torch.manual_seed(step)
                model(torch.randn(4, 3)).sum().backward()
        return float(model.module[1].running_mean.sum())

    zero, one = run_ranks(2, train)
    assert zero == one != 0


def test_early_termination_raises_on_every_rank() -> None:
    def train() -> int:
        model = paceline.DistributedDataParallel(SyncBatchNorm.convert_sync_batchnorm(build()))
        done: list[int] = []
        with pytest.raises(RuntimeError, match="exhausted"):
            train_until_one_is_done(model, done)
        return len(done)

    def train_until_one_is_done(model: nn.Module, done: list[int]) -> None:
        with model.join(throw_on_early_termination=True):
            for step in range(2 + dist.get_rank()):
                model(batch(0, step)).sum().backward()
                done.append(step)

    assert run_ranks(2, train) == [2, 2]
