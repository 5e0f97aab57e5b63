"""Prefetched batches: the order that servers see, and what happens off the beaten track."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import count

import pytest
import torch
from torch import Tensor

from paceline import ps
from paceline.ps.client.channel import Channel
from paceline.ps.client.ledger import OpenRequest
from paceline.ps.protocol.wire import Kind
from paceline.testing import warm_up

names = (f"prefetched {at}" for at in count())
ROWS = 20


@pytest.fixture(scope="module")
def servers() -> Iterator[ps.Servers]:
    warm_up()
    with ps.local(1, start_method="forkserver") as local, ps.connect(local) as connection:
        yield connection


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What goes to the server, in order: one connection delivers it in this order."""
    seen: list[str] = []
    post = Channel.post

    def spy(self: Channel, pending: OpenRequest) -> OpenRequest:
        if pending.kind in (Kind.LOOKUP, Kind.PUSH):
            seen.append(pending.kind.name.lower())
        return post(self, pending)

    monkeypatch.setattr(Channel, "post", spy)
    return seen


def make(servers: ps.Servers, staleness: int = 0) -> ps.EmbeddingBag:
    return ps.EmbeddingBag(
        ROWS,
        4,
        mode="sum",
        servers=servers,
        name=next(names),
        optimizer=ps.SGD(1.0),
        init=ps.Init(ps.Start.CONSTANT, 0.0),
        staleness=staleness,
    )


def batch(*ids: int) -> Tensor:
    return torch.tensor([ids])


def train(module: ps.EmbeddingBag, batches: list[Tensor], ahead: bool) -> list[float]:
    """Every step subtracts 1 from each row it used; the sum shows which pushes were seen."""
    seen = []
    for at, ids in enumerate(batches):
        output = module(ids)
        if ahead and at + 1 < len(batches):
            module.prefetch(batches[at + 1])
        seen.append(output.sum().item())
        output.sum().backward()
    return seen


SAME = [batch(1, 2) for _ in range(4)]


def test_staleness_0_is_the_order_without_prefetch(servers: ps.Servers, order: list[str]) -> None:
    plain = train(make(servers), SAME, ahead=False)
    unasked = list(order)
    order.clear()
    module = make(servers)
    assert train(module, SAME, ahead=True) == plain == [0.0, -8.0, -16.0, -24.0]
    assert order == unasked == ["lookup", "push"] * 4
    counts = module.prefetch_counts
    assert (counts.used, counts.late, counts.dropped) == (3, 0, 0)


def test_staleness_0_asks_right_behind_the_push(servers: ps.Servers, order: list[str]) -> None:
    module = make(servers)
    output = module(batch(1))
    module.prefetch(batch(2))
    assert order == ["lookup"]
    output.sum().backward()
    assert order == ["lookup", "push", "lookup"]
    module(batch(2))
    assert order == ["lookup", "push", "lookup"]


def test_staleness_1_asks_at_once_and_lacks_one_push(servers: ps.Servers, order: list[str]) -> None:
    module = make(servers, staleness=1)
    assert train(module, SAME, ahead=True) == [0.0, 0.0, -8.0, -16.0]
    assert order == ["lookup", "lookup", "push", "lookup", "push", "lookup", "push", "push"]


def test_staleness_2_may_be_two_batches_ahead(servers: ps.Servers, order: list[str]) -> None:
    module = make(servers, staleness=2)
    output = module(batch(1))
    module.prefetch(batch(1, 2))
    module.prefetch(batch(1, 3))
    assert order == ["lookup"] * 3
    output.sum().backward()
    assert module(batch(1, 2)).sum().item() == 0.0
    assert module(batch(1, 3)).sum().item() == 0.0
    assert module.prefetch_counts.late == 0


def test_a_batch_that_was_not_announced_is_looked_up(servers: ps.Servers, order: list[str]) -> None:
    module = make(servers)
    module.prefetch(batch(1))
    module(batch(2)).sum().backward()
    assert order == ["lookup", "lookup", "push"]
    assert module.prefetch_counts.used == 0


def test_rows_older_than_the_bound_are_asked_for_again(
    servers: ps.Servers, order: list[str]
) -> None:
    module = make(servers)
    module.prefetch(batch(5))
    module(batch(5, 6)).sum().backward()  # a push since it was asked for
    assert module(batch(5)).sum().item() == -4.0
    assert order == ["lookup", "lookup", "push", "lookup"]
    assert module.prefetch_counts.late == 1


def test_written_rows_are_seen(servers: ps.Servers) -> None:
    module = make(servers)
    module.prefetch(batch(3))
    module.write(torch.tensor([3]), torch.ones(1, 4))
    assert module(batch(3)).sum().item() == 4.0


def test_a_second_announcement_drops_the_first(
    servers: ps.Servers, caplog: pytest.LogCaptureFixture
) -> None:
    module = make(servers)
    with caplog.at_level(logging.WARNING, "paceline.ps"):
        for _ in range(3):
            module.prefetch(batch(1))
            module.prefetch(batch(2))
    assert module.prefetch_counts.dropped == 5
    assert [record.message for record in caplog.records if "not used" in record.message] != []
    assert sum("not used" in record.message for record in caplog.records) == 1
    assert module(batch(2)).sum().item() == 0.0
    assert module.prefetch_counts.used == 1


def test_a_graph_that_is_thrown_away_is_not_waited_for(
    servers: ps.Servers, order: list[str]
) -> None:
    module = make(servers)
    output = module(batch(1))
    module.prefetch(batch(2))
    assert order == ["lookup"]
    del output  # no backward: say, a loss that was not finite
    module.prefetch(batch(3))
    assert order == ["lookup", "lookup"]


def test_evaluation_in_between_changes_nothing(servers: ps.Servers, order: list[str]) -> None:
    module = make(servers)
    output = module(batch(1))
    module.prefetch(batch(2))
    with torch.no_grad():
        module(batch(4))
    output.sum().backward()
    assert order == ["lookup", "lookup", "push", "lookup"]
    module(batch(2))
    assert len(order) == 4


def test_equal_tensors_are_the_same_batch_and_changed_ones_are_not(servers: ps.Servers) -> None:
    module = make(servers)
    announced = batch(1, 2)
    module.prefetch(announced)
    module(batch(1, 2))
    assert module.prefetch_counts.used == 1
    module.prefetch(announced)
    announced[0, 0] = 7
    module(announced)
    assert module.prefetch_counts.used == 1


def test_collections_and_embeddings_prefetch_too(servers: ps.Servers, order: list[str]) -> None:
    tables = [ps.TableConfig(next(names), ROWS, 4) for _ in range(3)]
    collection = ps.EmbeddingBagCollection(tables, servers=servers)
    ids = {table.name: batch(at, at + 1) for at, table in enumerate(tables)}
    collection.prefetch(ids)
    collection(dict(ids))
    embedding = ps.Embedding(ROWS, 4, servers=servers, name=next(names))
    embedding.prefetch(batch(1))
    embedding(batch(1))
    assert order == ["lookup", "lookup"]
    assert collection.prefetch_counts.used == embedding.prefetch_counts.used == 1


def test_the_same_tensors_for_other_tables_are_another_batch(servers: ps.Servers) -> None:
    tables = [ps.TableConfig(next(names), ROWS, 4, mode="sum") for _ in range(2)]
    collection = ps.EmbeddingBagCollection(tables, servers=servers)
    first, second = (table.name for table in tables)
    ids = (batch(1, 2), batch(3, 4))
    collection.prefetch({first: ids[0], second: ids[1]})
    found = collection({second: ids[0], first: ids[1]})
    assert collection.prefetch_counts.used == 0
    assert torch.equal(found[first][0], collection.rows(first, ids[1][0]).sum(0))
