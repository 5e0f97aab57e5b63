"""Several trainers: the dense part under Paceline's DDP, the tables on servers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline import DistributedDataParallel, ps
from paceline.testing import run_ranks, warm_up

ROWS, DIM, STEPS, BATCH = 50, 8, 30, 16
LR = 0.2


@pytest.fixture(scope="module")
def addresses() -> Iterator[list[str]]:
    warm_up()
    with ps.local(2, start_method="forkserver") as servers:
        yield servers.addresses


class Model(nn.Module):
    """Two tables and a small network, whichever kind of tables."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables
        torch.manual_seed(0)
        self.dense = nn.Sequential(nn.Linear(2 * DIM, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        found = self.tables(batch)
        return cast(Tensor, self.dense(torch.cat([found["user"], found["item"]], 1)))


class LocalTables(nn.ModuleDict):
    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: self[name](ids) for name, ids in batch.items()}


def data(step: int) -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(step)
    batch = {
        name: torch.randint(ROWS, (BATCH, 3), generator=generator) for name in ("user", "item")
    }
    target = (batch["user"].sum(1) % 2).float().unsqueeze(1)
    return batch, target


def remote_tables(servers: ps.Servers, prefix: str, scale: float) -> ps.EmbeddingBagCollection:
    tables = [ps.TableConfig(f"{prefix}{name}", ROWS, DIM, mode="sum") for name in ("user", "item")]
    return ps.EmbeddingBagCollection(
        tables, servers=servers, optimizer=ps.SGD(LR), grad_scale=scale
    )


class Renamed(nn.Module):
    """Tables of one test among those of others."""

    def __init__(self, tables: ps.EmbeddingBagCollection, prefix: str) -> None:
        super().__init__()
        self.tables = tables
        self.prefix = prefix

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        found = self.tables({self.prefix + name: ids for name, ids in batch.items()})
        return {name.removeprefix(self.prefix): bags for name, bags in found.items()}


def train(addresses: list[str], prefix: str, accumulate: bool) -> list[float]:
    """One rank: its share of each batch, and the loss over all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    losses = []
    with ps.connect(addresses) as servers:
        tables = remote_tables(servers, prefix, 1 / world)
        model = DistributedDataParallel(Model(Renamed(tables, prefix)))
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        for step in range(STEPS):
            batch, target = data(step)
            share = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
            mine = {name: ids[share] for name, ids in batch.items()}
            loss = nn.functional.mse_loss(model(mine), target[share])
            dist.barrier()  # all have looked up before anybody pushes
            if accumulate and step % 2 == 0:
                with model.no_sync():
                    loss.backward()
            else:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            servers.flush()
            total = loss.detach().clone()
            dist.all_reduce(total)  # all pushes of this step are applied
            losses.append(total.item() / world)
    return losses


def train_alone(addresses: list[str], prefix: str) -> list[float]:
    """The whole batch in one process, with plain torch, from the same first rows."""
    with ps.connect(addresses) as servers:
        rows = remote_tables(servers, prefix, 1.0)
        local = LocalTables(
            {name: nn.EmbeddingBag(ROWS, DIM, mode="sum") for name in ("user", "item")}
        )
        for name in ("user", "item"):
            cast(nn.EmbeddingBag, local[name]).weight.data.copy_(
                rows.rows(prefix + name, torch.arange(ROWS))
            )
    model = Model(local)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for step in range(STEPS):
        batch, target = data(step)
        loss = nn.functional.mse_loss(model(batch), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("world", [1, 2])
def test_trainers_with_their_mean_are_one_large_batch(addresses: list[str], world: int) -> None:
    prefix = f"mean{world}"
    (expected,) = run_ranks(1, train_alone, addresses, prefix)
    per_rank = run_ranks(world, train, addresses, prefix, False)
    assert per_rank[0] == pytest.approx(expected, rel=1e-4)
    assert per_rank[0][-1] < 0.8 * per_rank[0][0]


def test_pushes_of_steps_without_sync_count_too(addresses: list[str]) -> None:
    losses = run_ranks(2, train, addresses, "no_sync", True)
    assert losses[0] == pytest.approx(losses[1])
    assert losses[0][-1] < losses[0][0]
