"""Buffers over shards: what no shard has changed keeps its bits, whatever happened before."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline import DistributedDataParallel as DDP
from paceline.errors import ConfigurationError
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


class Cached(nn.Module):
    """Makes a buffer in its first forward, of which there is only the name, or not even that."""

    def __init__(self, *, is_registered: bool, is_noisy: bool, has_norm: bool = True) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4) if has_norm else nn.Identity()
        self.layer = nn.Linear(4, 1)
        self.is_noisy = is_noisy
        if is_registered:
            self.register_buffer("cache", None)

    def forward(self, x: Tensor) -> Tensor:
        if getattr(self, "cache", None) is None:
            cache = x.mean(0).detach() if self.is_noisy else torch.arange(4.0)
            self.register_buffer("cache", cache)
        return self.layer(self.norm(x) + self.cache)


def run_rounds(ddp: DDP, rounds: int, *, begin: int = 0) -> None:
    owned = ddp.shard_shares.owned
    for step in range(begin, begin + rounds):
        rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        for micro in ddp.shards(rows[2 * owned.start : 2 * owned.stop]):
            ddp(micro).square().sum().backward()


def train_cached(kinds: list[dict[str, bool]]) -> list[str]:
    """Train each; return what is raised, or the value of the cache."""
    found = []
    for kind in kinds:
        torch.manual_seed(0)
        ddp = DDP(Cached(**kind), shards=4)
        try:
            run_rounds(ddp, 3)
            found.append(str(ddp.module.cache.tolist()))
        except ConfigurationError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_what_a_forward_makes_is_the_same_in_all_shards(world: int) -> None:
    kinds = [
        {"is_registered": True, "is_noisy": False},
        {"is_registered": False, "is_noisy": False},
        {"is_registered": False, "is_noisy": False, "has_norm": False},
        {"is_registered": True, "is_noisy": True},
        {"is_registered": False, "is_noisy": True},
    ]
    for found in run_ranks(world, train_cached, kinds):
        assert found[:3] == ["[0.0, 1.0, 2.0, 3.0]"] * 3
        for text in found[3:]:
            assert (
                "only if it is the same in all shards, as a cache is. These are not: cache" in text
            )


def evaluate_in_training_mode(ranks: list[int]) -> str:
    """Train, evaluate on some ranks, train; return what is raised."""
    torch.manual_seed(0)
    ddp, rows = DDP(Signed(), shards=2), torch.randn(2, FEATURES)

    def train_one_round() -> None:
        for micro in ddp.shards(rows):
            ddp(micro).sum().backward()

    train_one_round()
    if dist.get_rank() in ranks:
        with torch.no_grad():
            ddp(rows)
    try:
        train_one_round()
    except ConfigurationError as error:
        return str(error)
    return ""


def test_a_forward_outside_of_the_loop_that_changes_statistics() -> None:
    """On one rank: all ranks raise. On all of them, alike: nothing is wrong."""
    for found in run_ranks(2, evaluate_in_training_mode, [0]):
        assert "ranks had different buffers when this round began" in found
    assert run_ranks(2, evaluate_in_training_mode, [0, 1]) == ["", ""]
