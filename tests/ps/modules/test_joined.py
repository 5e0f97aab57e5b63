"""``EmbeddingBagCollection.joined``: outputs side by side, the same bits and the same pushes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paceline import ps
from paceline.errors import BagsError

Start = Callable[..., ps.LocalServers]
NAMES = ["a", "b", "c"]
ROWS = 40


def make(servers: ps.Servers, prefix: str) -> ps.EmbeddingBagCollection:
    tables = [
        ps.TableConfig(f"{prefix}a", ROWS, 4, mode="sum"),
        ps.TableConfig(f"{prefix}b", ROWS, 8, mode="mean"),
        ps.TableConfig(f"{prefix}c", ROWS, 4, mode="sum", sharding="table"),
    ]
    return ps.EmbeddingBagCollection(tables, servers=servers, optimizer=ps.Adagrad(0.1))


def batch_of(prefix: str, step: int, order: list[str], own: bool) -> dict[str, ps.Bags]:
    generator = torch.Generator().manual_seed(step)
    offsets = torch.tensor([0, 3, 3, 9])
    same = torch.randint(ROWS, (12,), generator=generator)
    found = {}
    for name in order:
        ids = torch.randint(ROWS, (12,), generator=generator) if own else same
        weights = torch.rand(12, generator=generator) if name == "c" and own else None
        found[prefix + name] = ps.Bags(ids, offsets, weights)
    return found


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("order", [["a", "b", "c"], ["c", "a"], ["b"]])
def test_it_is_the_concatenation(start_servers: Start, order: list[str], own: bool) -> None:
    with ps.connect(start_servers(2)) as servers:
        plain, joined = make(servers, "p"), make(servers, "j")
        for name in NAMES:
            joined.write(f"j{name}", torch.arange(ROWS), plain.rows(f"p{name}", torch.arange(ROWS)))
            plain.write(f"p{name}", torch.arange(ROWS), plain.rows(f"p{name}", torch.arange(ROWS)))
        for step in range(6):
            expected = torch.cat([*plain(batch_of("p", step, order, own)).values()], 1)
            batch = batch_of("j", step, order, own)
            if step % 2:
                joined.prefetch(batch)
            found = joined.joined(batch)
            assert torch.equal(found, expected)
            weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(step))
            (expected * weight).sum().backward()
            (found * weight).sum().backward()
        for name in NAMES:
            rows = [
                module.rows(prefix + name, torch.arange(ROWS))
                for module, prefix in ((plain, "p"), (joined, "j"))
            ]
            assert torch.equal(*rows)


def test_gradients_of_weights(start_servers: Start) -> None:
    with ps.connect(start_servers(1)) as servers:
        module = make(servers, "w")
        weights = [torch.rand(6, requires_grad=True) for _ in range(2)]
        ids, offsets = torch.arange(6), torch.tensor([0, 2])
        batches = [{"wa": ps.Bags(ids, offsets, each)} for each in weights]
        module(batches[0])["wa"].square().sum().backward()
        module.write("wa", ids, torch.ones(6, 4))
        weights[0].grad = None
        module(batches[0])["wa"].square().sum().backward()
        module.write("wa", ids, torch.ones(6, 4))
        with torch.no_grad():
            weights[1].copy_(weights[0])
        module.joined(batches[1]).square().sum().backward()
        assert weights[0].grad is not None
        assert weights[1].grad is not None
        assert torch.equal(weights[0].grad, weights[1].grad)


def test_what_does_not_fit_is_named(start_servers: Start) -> None:
    with ps.connect(start_servers(1)) as servers:
        module = make(servers, "e")
        with pytest.raises(BagsError, match=r"'ea': 2, 'eb': 1"):
            module.joined({"ea": torch.tensor([[1], [2]]), "eb": torch.tensor([[1]])})
        with pytest.raises(Exception, match="nobody"):
            module.joined({"nobody": torch.tensor([[1]])})
        assert module.joined({"ea": torch.tensor([[1], [2]])}).shape == (2, 4)


def test_without_a_graph_nothing_is_pushed(start_servers: Start) -> None:
    with ps.connect(start_servers(1)) as servers:
        module = make(servers, "n")
        with torch.no_grad():
            assert not module.joined({"na": torch.tensor([[1]])}).requires_grad
        found = module.joined({"na": torch.tensor([[1]])})
        module.joined({"nb": torch.tensor([[1]])})  # its graph is dropped
        before = module.rows("na", torch.tensor([1]))
        found.sum().backward()
        assert not torch.equal(module.rows("na", torch.tensor([1])), before)
