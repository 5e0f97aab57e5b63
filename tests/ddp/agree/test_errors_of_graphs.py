"""A backward that brings other gradients than it should has an error of its own on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline import DistributedDataParallel as DDP
from paceline.errors import (
    AutogradGradError,
    GraphChangedError,
    ReadyTwiceError,
    UnusedParametersError,
)
from paceline.testing import run_ranks
from tests.ddp.agree.error_cases import (
    Gradients,
    Net,
    batch,
    error_of,
    expected,
    good_step,
    mentions,
)


class TestUnusedParameters:
    NAMES = ("right.weight", "right.bias")

    @staticmethod
    def run(
        ranks: int, uses: Callable[[int], Sequence[str]], **options: Any
    ) -> list[tuple[Exception | None, Gradients]]:
        def run() -> tuple[Exception | None, Gradients]:
            rank = dist.get_rank()
            ddp = DDP(Net(), **options)
            error = error_of(lambda: ddp(batch(rank), uses(rank)).sum().backward())
            return error, good_step(ddp)

        return run_ranks(ranks, run)

    def test_on_one_rank(self) -> None:
        results = self.run(3, lambda rank: ["left"] if rank == 1 else ["left", "right"])
        for error, after in results:
            assert isinstance(error, UnusedParametersError)
            assert mentions(error, *self.NAMES, "rank 1", "find_unused_parameters=True")
            assert "rank 0" not in str(error)
            assert "rank 2" not in str(error)
            assert error.rank == 1
            assert set(error.parameters) == set(self.NAMES)
            torch.testing.assert_close(after, expected(3))

    def test_on_all_ranks(self) -> None:
        for error, after in self.run(2, lambda rank: ["left"], bucket_cap_mb=1e-6):
            assert isinstance(error, UnusedParametersError)
            assert mentions(error, *self.NAMES, "rank 0: ", "rank 1: ")
            torch.testing.assert_close(after, expected(2))

    def test_different_ones_on_each_rank(self) -> None:
        for error, after in self.run(2, lambda rank: [("left", "right")[rank]]):
            assert isinstance(error, UnusedParametersError)
            lines = str(error).splitlines()
            for rank, name in ((0, "right"), (1, "left")):
                (line,) = (line for line in lines if line.startswith(f"  rank {rank}: "))
                assert f"{name}.weight" in line
            torch.testing.assert_close(after, expected(2))

    def test_in_a_later_step(self) -> None:
        """The first step brings all; in the third, after the rebuild, some stay away."""

        def run() -> tuple[Exception | None, Gradients]:
            rank = dist.get_rank()
            ddp = DDP(Net(), bucket_cap_mb=1e-6)
            good_step(ddp)
            good_step(ddp)
            uses = ["left"] if rank == 0 else ["left", "right"]
            error = error_of(lambda: ddp(batch(rank), uses).sum().backward())
            return error, good_step(ddp)

        for error, after in run_ranks(2, run):
            assert isinstance(error, UnusedParametersError)
            assert error.rank == 0
            torch.testing.assert_close(after, expected(2))

    def test_output_outside_of_the_loss(self) -> None:
        """With the flag on, what is missing is found by the engine, not by the graph: no error."""

        class TwoOutputs(Net):
            def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
                hidden = torch.tanh(self.trunk(x))
                return self.left(hidden), self.right(hidden)

        def run() -> bool:
            ddp = DDP(TwoOutputs(), find_unused_parameters=True)
            ddp(batch(0))[0].sum().backward()
            return ddp.module.right.weight.grad is None

        assert run_ranks(2, run) == [True, True]


class TestWaitForGradients:
    """``missing_gradients="wait"``: several backward passes may bring the gradients together."""

    @staticmethod
    def two_losses(ddp: DDP) -> tuple[torch.Tensor, torch.Tensor]:
        x = batch(dist.get_rank())
        return ddp(x, ["left"]).square().sum(), ddp(x, ["right"]).square().sum()

    def test_two_backwards_together(self) -> None:
        class Apart(nn.Module):
            """Two halves that share nothing, so that each backward brings one of them."""

            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(11)
                self.left, self.right = nn.Linear(4, 2), nn.Linear(4, 2)

            def forward(self, x: torch.Tensor) -> Any:
                return self.left(x), self.right(x)

        def run() -> tuple[list[Gradients], int]:
            ddp = DDP(Apart(), missing_gradients="wait")
            found = []
            for _ in range(3):
                ddp.zero_grad()
                left, right = ddp(batch(dist.get_rank()))
                left.square().sum().backward()
                right.square().sum().backward()
                found.append({n: p.grad.clone() for n, p in ddp.module.named_parameters()})
            return found, ddp.stats().steps

        net = Apart()
        for rank in range(2):
            left, right = net(batch(rank))
            ((left.square().sum() + right.square().sum()) / 2).backward()
        wanted = {name: p.grad for name, p in net.named_parameters()}
        for found, steps in run_ranks(2, run):
            assert steps == 3
            for one in found:
                torch.testing.assert_close(one, wanted)

    def test_next_forward_raises_if_they_never_come(self) -> None:
        def run() -> tuple[Exception | None, Exception | None, Gradients]:
            ddp = DDP(Net(), missing_gradients="wait")
            backward = error_of(lambda: ddp(batch(0), ["left"]).sum().backward())
            forward = error_of(lambda: ddp(batch(0)))
            return backward, forward, good_step(ddp)

        for backward, forward, after in run_ranks(2, run):
            assert backward is None
            assert isinstance(forward, UnusedParametersError)
            assert mentions(forward, "right.weight", "right.bias", "find_unused_parameters=True")
            torch.testing.assert_close(after, expected(2))


class TestAutogradGrad:
    def test_for_parameters_raises(self) -> None:
        def run() -> tuple[Exception | None, Gradients]:
            ddp = DDP(Net())
            parameters = list(ddp.parameters())
            error = error_of(lambda: torch.autograd.grad(ddp(batch(0)).sum(), parameters))
            return error, good_step(ddp)

        for error, after in run_ranks(2, run):
            assert isinstance(error, AutogradGradError)
            assert mentions(error, "torch.autograd.grad", "backward()", "no_sync")
            torch.testing.assert_close(after, expected(2))

    def test_for_one_parameter_of_many_raises(self) -> None:
        def run() -> tuple[Exception | None, Gradients]:
            ddp = DDP(Net())
            last = ddp.module.right.bias
            error = error_of(lambda: torch.autograd.grad(ddp(batch(0)).sum(), [last]))
            return error, good_step(ddp)

        for error, after in run_ranks(2, run):
            assert isinstance(error, AutogradGradError)
            torch.testing.assert_close(after, expected(2))

    def test_under_no_sync_gives_local_gradients(self) -> None:
        def run() -> tuple[torch.Tensor, Gradients]:
            ddp = DDP(Net())
            with ddp.no_sync():
                loss = ddp(batch(dist.get_rank())).square().sum()
            (gradient,) = torch.autograd.grad(loss, [ddp.module.trunk.weight])
            return gradient, good_step(ddp)

        for rank, (gradient, after) in enumerate(run_ranks(2, run)):
            net = Net()
            net(batch(rank)).square().sum().backward()
            torch.testing.assert_close(gradient, net.trunk.weight.grad)
            torch.testing.assert_close(after, expected(2))

    def test_gradient_penalty_works(self) -> None:
        """autograd.grad for inputs, with a graph, then backward through its result."""

        def penalised(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            x = x.clone().requires_grad_(True)
            output = model(x).square().sum()
            (gradient,) = torch.autograd.grad(output, [x], create_graph=True)
            return output + gradient.square().sum()

        def run() -> list[Gradients]:
            ddp = DDP(Net())
            found = []
            for _ in range(3):
                ddp.zero_grad()
                penalised(ddp, batch(dist.get_rank())).backward()
                found.append({n: p.grad.clone() for n, p in ddp.module.named_parameters()})
            return found

        net = Net()
        for rank in range(2):
            (penalised(net, batch(rank)) / 2).backward()
        wanted = {name: p.grad for name, p in net.named_parameters()}
        for found in run_ranks(2, run):
            for one in found:
                torch.testing.assert_close(one, wanted)


class TestStaticGraph:
    @staticmethod
    def run(
        first: Sequence[str], then: Callable[[int], Sequence[str]]
    ) -> list[tuple[Exception | None, Gradients]]:
        def run() -> tuple[Exception | None, Gradients]:
            rank = dist.get_rank()
            ddp = DDP(Net(), static_graph=True)
            for _ in range(2):
                ddp.zero_grad()
                ddp(batch(rank), first).square().sum().backward()
            error = error_of(lambda: ddp(batch(rank), then(rank)).square().sum().backward())
            ddp.zero_grad()
            ddp(batch(rank), first).square().sum().backward()
            return error, {
                n: p.grad.clone() for n, p in ddp.module.named_parameters() if p.grad is not None
            }

        return run_ranks(2, run)

    def test_used_first_and_not_later(self) -> None:
        for error, after in self.run(["left", "right"], lambda rank: ["left"]):
            assert isinstance(error, GraphChangedError)
            assert mentions(
                error, "right.weight", "rank 0", "rank 1", "find_unused_parameters=True instead"
            )
            torch.testing.assert_close(after, expected(2))

    def test_used_first_and_not_later_on_one_rank(self) -> None:
        results = self.run(
            ["left", "right"], lambda rank: ["left"] if rank == 1 else ["left", "right"]
        )
        for error, after in results:
            assert isinstance(error, GraphChangedError)
            assert error.rank == 1
            torch.testing.assert_close(after, expected(2))

    def test_unused_first_and_used_later(self) -> None:
        for error, after in self.run(["left"], lambda rank: ["left", "right"]):
            assert isinstance(error, GraphChangedError)
            assert mentions(error, "right", "rank 0", "rank 1", "find_unused_parameters=True")
            assert "left.weight" in after

    def test_used_more_often_later(self) -> None:
        def run() -> tuple[Exception | None, Gradients, Gradients]:
            ddp = DDP(Repeated(), static_graph=True)
            x = batch(dist.get_rank()).requires_grad_()
            ddp(x, times=1).sum().backward()
            ddp.zero_grad()
            error = error_of(lambda: ddp(x, times=2).sum().backward())
            return error, good_step(ddp, lambda x: ddp(x, times=1)), repeated(times=1)

        for error, after, wanted in run_ranks(2, run):
            assert isinstance(error, GraphChangedError)
            assert mentions(error, "trunk", "rank 0", "rank 1")
            torch.testing.assert_close(after, wanted)


class Repeated(Net):
    """Runs its trunk several times under reentrant checkpointing, behind a first layer or not."""

    def __init__(self, stem: bool = True) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4) if stem else nn.Identity()

    def forward(self, x: torch.Tensor, times: int = 2) -> torch.Tensor:  # type: ignore[override]
        x = self.stem(x.requires_grad_())
        for _ in range(times):
            x = checkpoint(self.trunk, x, use_reentrant=True)
        return self.left(x) + self.right(x)


def repeated(times: int, stem: bool = True) -> Gradients:
    """What one process computes. In the ranks: checkpoint() changes the environment."""
    net = Repeated(stem)
    for rank in range(2):
        (net(batch(rank), times).square().sum() / 2).backward()
    return {name: p.grad for name, p in net.named_parameters()}


class TestReadyTwice:
    @pytest.mark.parametrize("stem", [True, False], ids=["in the middle", "last of all"])
    def test_reentrant_checkpoint_used_twice(self, stem: bool) -> None:
        """Without a stem, the second gradient comes when every bucket is on its way already."""

        def run() -> tuple[Exception | None, Gradients, Gradients]:
            ddp = DDP(Repeated(stem))
            error = error_of(lambda: ddp(batch(dist.get_rank())).sum().backward())
            return error, good_step(ddp, lambda x: ddp(x, times=1)), repeated(1, stem)

        for rank, (error, after, wanted) in enumerate(run_ranks(2, run)):
            assert isinstance(error, ReadyTwiceError)
            assert mentions(error, "trunk", f"rank {rank}")
            assert mentions(error, "static_graph=True", "use_reentrant=False")
            torch.testing.assert_close(after, wanted)

    def test_static_graph_is_the_remedy(self) -> None:
        def run() -> tuple[list[Gradients], Gradients]:
            ddp = DDP(Repeated(), static_graph=True)
            return [good_step(ddp) for _ in range(3)], repeated(times=2)

        for found, wanted in run_ranks(2, run):
            for one in found:
                torch.testing.assert_close(one, wanted)
