"""One trainer, staleness 0: training equals plain local torch, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer step would, and change the environment
from torch import Tensor, nn

from paceline import ps
from paceline.native.extension import native
from paceline.ps.client import batch as inputs
from paceline.ps.client import message_plan as planner
from paceline.testing import warm_up

STEPS = 50
ROWS, DIM, TABLES = 300, 16, 3
LR = 0.1

OPTIMIZERS: dict[str, tuple[ps.SGD | ps.Adagrad | ps.Adam, Callable[..., torch.optim.Optimizer]]]
OPTIMIZERS = {
    "sgd": (ps.SGD(LR), lambda params: torch.optim.SGD(params, lr=LR)),
    "adagrad": (ps.Adagrad(LR), lambda params: torch.optim.Adagrad(params, lr=LR)),
    "adam": (ps.Adam(LR), lambda params: torch.optim.SparseAdam(list(params), lr=LR)),
}


@pytest.fixture(scope="module")
def connections() -> Iterator[dict[int, ps.Servers]]:
    """Connections to 1, 2 and 3 of the same servers."""
    warm_up()
    with ps.local(3, start_method="forkserver") as servers:
        found = {n: ps.connect(servers.addresses[:n]) for n in (1, 2, 3)}
        yield found
        for connection in found.values():
            connection.close()


def random_bags(generator: torch.Generator, rows: int = ROWS) -> ps.Bags:
    """8 bags, some of them empty, of 60 ids with many duplicates."""
    ids = torch.randint(rows, (60,), generator=generator) // 3
    cuts = torch.randint(61, (7,), generator=generator).sort().values
    return ps.Bags(ids, torch.cat([torch.zeros(1, dtype=torch.int64), cuts]))


def dense_part() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(TABLES * DIM, 8), nn.Tanh(), nn.Linear(8, 1))


def step(dense: nn.Module, found: list[Tensor], optimizer: torch.optim.Optimizer) -> float:
    loss = dense(torch.cat(found, 1)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other are slow on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("is_shared", [False, True], ids=["own", "same"])
@pytest.mark.parametrize("core", [None, native], ids=["python", "native"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(
    ("sharding", "servers", "mode"),
    [
        ("hash", 1, "sum"),
        ("hash", 3, "sum"),
        ("hash", 2, "mean"),
        ("range", 2, "sum"),
        ("range", 3, "mean"),
        ("table", 2, "sum"),
        ("table", 3, "mean"),
    ],
)
def test_training_equals_local_torch(
    connections: dict[int, ps.Servers],
    monkeypatch: pytest.MonkeyPatch,
    sharding: str,
    servers: int,
    mode: str,
    kind: str,
    core: Any,
    is_shared: bool,
) -> None:
    """With bags of its own for each table, and with the same for all."""
    monkeypatch.setattr(planner, "native", core)
    monkeypatch.setattr(inputs, "native", core)
    policy, make = OPTIMIZERS[kind]
    sparse = kind == "adam"
    connection = connections[servers]
    configs = [
        ps.TableConfig(
            f"{sharding}{servers}{kind}{mode}{at}{core is None}{is_shared}",
            ROWS,
            DIM,
            mode=mode,
            sparse=sparse,
            sharding=sharding,
            optimizer=policy,
        )
        for at in range(TABLES)
    ]
    remote = ps.EmbeddingBagCollection(configs, servers=connection)
    local = [nn.EmbeddingBag(ROWS, DIM, mode=mode, sparse=sparse) for _ in configs]
    for config, module in zip(configs, local, strict=True):
        module.weight.data.copy_(remote.rows(config.name, torch.arange(ROWS)))
    tables = make([module.weight for module in local])
    dense, dense_local = dense_part(), dense_part()
    optimizer = torch.optim.SGD(dense.parameters(), lr=LR)
    optimizer_local = torch.optim.SGD(dense_local.parameters(), lr=LR)
    generator = torch.Generator().manual_seed(2)
    for _ in range(STEPS):
        bags = [random_bags(generator) for _ in configs]
        bags = bags[:1] * TABLES if is_shared else bags
        batch = {config.name: each for config, each in zip(configs, bags, strict=True)}
        loss = step(dense, list(remote(batch).values()), optimizer)
        found = [module(each.ids, each.offsets) for module, each in zip(local, bags, strict=True)]
        expected = step(dense_local, found, optimizer_local)
        tables.step()
        tables.zero_grad()
        assert loss == expected
    for config, module in zip(configs, local, strict=True):
        rows = remote.rows(config.name, torch.arange(ROWS))
        assert torch.equal(rows, module.weight), (rows - module.weight).abs().max()
