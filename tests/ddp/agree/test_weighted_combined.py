"""``ddp.weighted(n)`` together with other features, and its misuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from paceline import DistributedDataParallel as DDP
from paceline.errors import ConfigurationError, DesynchronizedError
from paceline.testing import run_ranks
from tests.ddp.agree.weighted_cases import (
    UNEQUAL,
    Gradients,
    Net,
    assert_all_close,
    gradients,
    make_batch,
    mean_loss,
    plain_step,
    reference,
    weighted_step,
)


class TestTogetherWith:
    def test_no_sync(self) -> None:
        """Accumulated gradients carry the weight of the backward that reduces them."""
        weights = (3, 1)

        def run() -> Gradients:
            rank = dist.get_rank()
            ddp = DDP(Net())
            with ddp.weighted(weights[rank]):
                with ddp.no_sync():
                    mean_loss(ddp(make_batch(rank, 4)[0]), torch.zeros(4, 3)).backward()
                mean_loss(ddp(make_batch(rank, 4)[0]), torch.ones(4, 3)).backward()
            return gradients(ddp)

        expected: Gradients = {}
        for rank, weight in enumerate(weights):
            net = Net()
            mean_loss(net(make_batch(rank, 4)[0]), torch.zeros(4, 3)).backward()
            mean_loss(net(make_batch(rank, 4)[0]), torch.ones(4, 3)).backward()
            for name, gradient in gradients(net).items():
                expected[name] = expected.get(name, 0) + gradient * weight / sum(weights)
        assert_all_close(run_ranks(2, run), expected)

    def test_gradients_of_an_earlier_step(self) -> None:
        def run() -> Gradients:
            ddp = DDP(Net())
            weighted_step(ddp, (4, 2))
            weighted_step(ddp, (4, 2))
            return gradients(ddp)

        expected = {name: 2 * g for name, g in reference((4, 2)).items()}
        assert_all_close(run_ranks(2, run), expected)

    def test_unused_parameters(self) -> None:
        """`spare` is used on rank 0 only; then nowhere, and keeps its gradient."""
        weights = (3, 1)

        def step(ddp: DDP, *, spare: bool) -> None:
            rank = dist.get_rank()
            x, y = make_batch(rank, 4)
            with ddp.weighted(weights[rank]):
                mean_loss(ddp(x, spare=spare), y).backward()

        def run() -> tuple[Gradients, Gradients]:
            ddp = DDP(Net(), find_unused_parameters=True)
            step(ddp, spare=dist.get_rank() == 0)
            before = gradients(ddp)
            for name in ("first", "second"):
                getattr(ddp.module, name).grad = None
            step(ddp, spare=False)
            return before, gradients(ddp)

        net = Net()
        x, y = make_batch(0, 4)
        mean_loss(net(x), y).backward()
        expected = net.spare.grad * weights[0] / sum(weights)
        for before, after in run_ranks(2, run):
            torch.testing.assert_close(before["spare"], expected)
            assert torch.equal(after["spare"], before["spare"])
            assert not torch.equal(after["first"], before["first"])

    def test_static_graph(self) -> None:
        def run() -> list[Gradients]:
            ddp = DDP(Net(), static_graph=True)
            found = []
            for _ in range(3):
                ddp.zero_grad()
                weighted_step(ddp, UNEQUAL)
                found.append(gradients(ddp))
            return found

        for steps in run_ranks(3, run):
            assert_all_close(steps, reference(UNEQUAL))

    def test_communication_hook(self) -> None:
        def run() -> list[Gradients]:
            ddp = DDP(Net(), bucket_cap_mb=1e-6)
            ddp.register_comm_hook(None, allreduce_hook)
            found = []
            for _ in range(2):
                ddp.zero_grad()
                weighted_step(ddp, (5, 2))
                found.append(gradients(ddp))
            return found

        for steps in run_ranks(2, run):
            assert_all_close(steps, reference((5, 2)))

    def test_sparse_gradients(self) -> None:
        rows = ((1, 1, 5), (1, 7))

        def build() -> nn.Sequential:
            torch.manual_seed(0)
            return nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))

        def run() -> Gradients:
            ddp = DDP(build())
            mine = torch.tensor(rows[dist.get_rank()])
            with ddp.weighted(len(mine)):
                ddp(mine).square().mean().backward()
            return {name: g.to_dense() for name, g in gradients(ddp).items()}

        net = build()
        net(torch.tensor([*rows[0], *rows[1]])).square().mean().backward()
        expected = {name: g.to_dense() for name, g in gradients(net).items()}
        assert_all_close(run_ranks(2, run), expected)

    def test_sparse_gradients_without_weight(self) -> None:
        def run() -> torch.Tensor:
            ddp = DDP(nn.Embedding(4, 2, sparse=True))
            scale = float("nan") if dist.get_rank() else 2.0
            with ddp.weighted(1 - dist.get_rank()):
                (ddp(torch.tensor([1])).sum() * scale).backward()
            return ddp.module.weight.grad.to_dense()

        expected = torch.zeros(4, 2)
        expected[1] = 2.0
        for found in run_ranks(2, run):
            assert torch.equal(found, expected)

    def test_join(self) -> None:
        """Rank 0 has one batch more. Afterwards both train on together."""
        sizes = ((5, 2), (200, 0))

        def run() -> tuple[list[Gradients], Gradients]:
            ddp = DDP(Net())
            found = []
            with ddp.join():
                for step in sizes[: 2 - dist.get_rank()]:
                    ddp.zero_grad()
                    weighted_step(ddp, step)
                    found.append(gradients(ddp))
            ddp.zero_grad()
            weighted_step(ddp, (5, 2))
            return found, gradients(ddp)

        (two, after_0), (one, after_1) = run_ranks(2, run)
        assert_all_close([two[0], one[0]], reference((5, 2)))
        assert_all_close([two[1]], reference((200,)))
        assert_all_close([after_0, after_1], reference((5, 2)))


def _error_of(ddp: DDP, n: Any) -> BaseException | None:
    try:
        with ddp.weighted(n):
            return None
    except Exception as error:
        return error


class TestMistakes:
    def test_one_rank_without_weight(self) -> None:
        def run() -> tuple[DesynchronizedError, Gradients]:
            ddp = DDP(Net())
            step = weighted_step if dist.get_rank() == 0 else plain_step
            with pytest.raises(DesynchronizedError) as raised:
                step(ddp, (5, 2))
            ddp.zero_grad()
            weighted_step(ddp, (5, 2))
            return raised.value, gradients(ddp)

        for error, found in run_ranks(2, run):
            assert error.rank == 1
            assert "[0]" in str(error)
            assert "[1]" in str(error)
            assert "with ddp.weighted(n)" in str(error)
            torch.testing.assert_close(found, reference((5, 2)))

    def test_weight_that_is_none(self) -> None:
        wrong = (-1, float("nan"), float("inf"), "many", "5", None)

        def run() -> tuple[list[BaseException | None], Gradients]:
            ddp = DDP(Net())
            found = [_error_of(ddp, n) for n in wrong]
            x, y = make_batch(0, 4)
            mean_loss(ddp(x), y).backward()
            return found, gradients(ddp)

        ((found, after),) = run_ranks(1, run)
        torch.testing.assert_close(after, reference((4,)))
        for n, error in zip(wrong, found, strict=True):
            assert isinstance(error, ConfigurationError), n
            assert "weighted(" in str(error)
            assert str(n) in str(error)
            assert "not negative" in str(error)

    def test_exception_inside_restores_the_plain_mean(self) -> None:
        def run() -> Gradients:
            rank = dist.get_rank()
            ddp = DDP(Net())
            with pytest.raises(KeyError), ddp.weighted(1 + rank):
                raise KeyError
            x, y = make_batch(rank, 4)
            mean_loss(ddp(x), y).backward()
            return gradients(ddp)

        assert_all_close(run_ranks(2, run), reference((4, 4)))

    def test_inner_weight_holds_inside_only(self) -> None:
        def run() -> list[Gradients]:
            ddp = DDP(Net())
            found = []
            with ddp.weighted((5, 2)[dist.get_rank()]):
                weighted_step(ddp, (2, 5))
                found.append(gradients(ddp))
                ddp.zero_grad()
                x, y = make_batch(dist.get_rank(), (5, 2)[dist.get_rank()])
                mean_loss(ddp(x), y).backward()
                found.append(gradients(ddp))
            return found

        for inner, outer in run_ranks(2, run):
            torch.testing.assert_close(inner, reference((2, 5)))
            torch.testing.assert_close(outer, reference((5, 2)))
