"""Sparse gradients: nn.Embedding(sparse=True) and EmbeddingBag."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline import DistributedDataParallel as DDP
from paceline.testing import run_ranks
from tests.ddp.compare import (
    assert_close,
    assert_identical,
    assert_same_on_all_ranks,
    gradients,
    pair,
    reference_gradients,
    step_both,
)
from tests.ddp.models import Bag, seeded


def tokens(step: int, rank: int | None = None, rows: int = 12) -> Tensor:
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(7 + 100 * step + rank)
    return torch.randint(rows, (3, 4), generator=generator)


@pytest.mark.parametrize("views", [None, True, False])
@pytest.mark.parametrize("world", [2, 3])
def test_embedding(world: int, views: bool | None) -> None:
    def on_rank() -> None:
        ours, theirs = pair(seeded(Bag), gradient_as_bucket_view=views)
        for step in range(3):
            for model in (ours, theirs):
                model.zero_grad()
                model(tokens(step)).square().mean().backward()
            found = gradients(ours)
            assert ours.module.embedding.weight.grad.is_sparse
            if world == 2:
                assert_identical(found, gradients(theirs))
            expected = reference_gradients(
                ours, lambda m, rank, s=step: m(tokens(s, rank)).square().mean()
            )
            assert_close(found, expected)
            assert_same_on_all_ranks(found)

    run_ranks(world, on_rank)


def test_embedding_bag_alone() -> None:
    def on_rank() -> None:
        torch.manual_seed(0)
        ours, theirs = pair(nn.EmbeddingBag(12, 3, mode="sum", sparse=True))
        for step in range(3):
            step_both(ours, theirs, lambda m, s=step: m(tokens(s)).square().mean())

    run_ranks(2, on_rank)


def test_one_rank_has_no_tokens() -> None:
    def on_rank() -> None:
        ddp = DDP(seeded(Bag))
        for step in range(3):
            ddp.zero_grad()

            def loss(model: nn.Module, rank: int, step: int = step) -> Tensor:
                mine = tokens(step, rank)
                return model(mine[:0] if rank == step % 2 else mine).square().sum()

            loss(ddp, dist.get_rank()).backward()
            assert_close(gradients(ddp), reference_gradients(ddp, loss))
            assert_same_on_all_ranks(gradients(ddp))

    run_ranks(2, on_rank)


class Optional(nn.Module):
    """The embedding is skipped when there are no tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = Bag()
        self.linear = nn.Linear(2, 2)

    def forward(self, words: Tensor | None) -> Tensor:
        x = torch.ones(1, 2) if words is None else self.bag(words).mean(dim=1)
        return self.linear(x).square().mean()


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}])
def test_one_rank_does_not_use_it(options: dict[str, bool]) -> None:
    """torch raises here: 'Expected sparse gradient to be defined'."""

    def on_rank() -> None:
        ddp = DDP(seeded(Optional), **options)

        def loss(model: nn.Module, rank: int, step: int) -> Tensor:
            return model(None if rank == 0 else tokens(step, rank))

        for step in range(3):
            ddp.zero_grad()
            loss(ddp, dist.get_rank(), step).backward()
            expected = reference_gradients(ddp, lambda m, rank, s=step: loss(m, rank, s))
            assert_close(gradients(ddp), expected)
            assert_same_on_all_ranks(gradients(ddp))

    run_ranks(2, on_rank)


def test_nobody_uses_it() -> None:
    def on_rank() -> None:
        model = seeded(Optional)
        ddp = DDP(model, find_unused_parameters=True)
        ddp(None).backward()
        assert model.bag.embedding.weight.grad is None
        ddp(tokens(0)).backward()
        before = model.bag.embedding.weight.grad.clone()
        ddp(None).backward()
        assert torch.equal(model.bag.embedding.weight.grad.to_dense(), before.to_dense())

    run_ranks(2, on_rank)


def test_accumulation() -> None:
    def on_rank() -> None:
        ours, theirs = pair(seeded(Bag))
        for step in range(2):
            for model in (ours, theirs):
                for micro in range(3):
                    with model.no_sync() if micro < 2 else contextlib.nullcontext():
                        model(tokens(10 * step + micro)).square().mean().backward()
            assert_identical(gradients(ours), gradients(theirs))

    run_ranks(2, on_rank)


def test_metadata_makes_it_dense_on_the_wire() -> None:
    """_set_sparse_metadata names the rows, equal on all ranks; the result is the same."""

    def on_rank() -> None:
        model = seeded(Bag)
        plain, told = DDP(copy.deepcopy(model)), DDP(model)
        for step in range(3):
            everything = torch.cat([tokens(step, rank) for rank in range(2)]).unique()
            told._set_sparse_metadata({"embedding.weight": everything})
            for ddp in (plain, told):
                ddp.zero_grad()
                ddp(tokens(step)).square().mean().backward()
            assert_identical(gradients(told), gradients(plain))
            gradient = told.module.embedding.weight.grad.coalesce()
            assert torch.equal(gradient.indices()[0], everything)

    run_ranks(2, on_rank)


def test_a_user_holds_a_sparse_gradient() -> None:
    def on_rank() -> None:
        model = seeded(Bag)
        ddp = DDP(model)
        ddp(tokens(0)).square().mean().backward()
        held = model.embedding.weight.grad
        before = held.to_dense()
        ddp.zero_grad()
        ddp(tokens(1)).square().mean().backward()
        assert torch.equal(held.to_dense(), before)

    run_ranks(2, on_rank)


def test_sparse_and_large_dense_with_an_optimizer() -> None:
    def on_rank() -> None:
        ours, theirs = pair(seeded(Bag))
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, theirs)]
        for step in range(4):
            step_both(ours, theirs, lambda m, s=step: m(tokens(s)).square().mean())
            for optimizer in optimizers:
                optimizer.step()
        state, other = ours.module.state_dict(), theirs.module.state_dict()
        assert_identical(dict(state), dict(other))

    run_ranks(2, on_rank)
