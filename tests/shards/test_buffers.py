"""Buffers over shards: what no shard has changed keeps its bits, whatever happened before."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline import DistributedDataParallel as DDP
from paceline.testing import run_ranks

FEATURES = 40


class Signed(nn.Module):
    """A layer with a buffer that becomes -0.0 if it is 0.0."""

    zero: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)
        self.norm.running_mean += torch.rand(FEATURES)
        self.layer = nn.Linear(FEATURES, 1)
        self.register_buffer("zero", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.norm.training:
            self.zero.neg_()
        return self.layer(self.norm(x))


def train(shards: int, regroups: bool) -> list[list[Tensor]]:
    """Return the buffers after each step; statistics stand still from the third one on."""
    torch.manual_seed(0)
    model = Signed()
    ddp = DDP(model, shards=shards)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    owned = ddp.shard_shares.owned
    found = []
    for step in range(6):
        if step == 2:
            model.norm.eval()
        if step == 4 and regroups:
            ddp._update_process_group(dist.group.WORLD)
        rows = torch.randn(2 * shards, FEATURES, generator=torch.Generator().manual_seed(step))
        for micro in ddp.shards(rows[2 * owned.start : 2 * owned.stop]):
            ddp(micro).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append([each.clone() for each in (*model.buffers(), *model.parameters())])
    return [[each.detach() for each in values] for values in found]


def bits(steps: list[list[Tensor]]) -> list[list[bytes]]:
    return [[each.numpy().tobytes() for each in values] for values in steps]


@functools.cache
def on_one_rank(shards: int) -> list[list[Tensor]]:
    return run_ranks(1, train, shards, False)[0]


@pytest.mark.parametrize("shards", [3, 11])  # 1 / shards is not exact
@pytest.mark.parametrize("regroups", [False, True])
def test_buffers_do_not_depend_on_what_was_changed_before(shards: int, regroups: bool) -> None:
    expected = on_one_rank(shards)
    for found in run_ranks(2, train, shards, regroups):
        assert bits(found) == bits(expected)
    buffers = [values[:4] for values in expected]
    assert bits(buffers)[2:] == bits(buffers)[1:2] * 4
    assert bits(buffers)[0] != bits(buffers)[1]


def test_a_zero_that_changes_its_sign_has_changed() -> None:
    """Every shard begins with 0.0, then with -0.0."""
    signs = [bool(values[0].signbit().all()) for values in on_one_rank(3)]
    assert signs[:3] == [True, False, False]
