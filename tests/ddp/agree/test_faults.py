"""A backward that raises on some ranks: nobody hangs, everybody is told, and training goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.errors import PeerFailedError, StepError
from tests.ddp.agree.fault_cases import (
    Boom,
    Gradients,
    batch,
    caught,
    expected,
    good_step,
    run_faulty,
    step_with_fault,
    wrap,
)


class FailingLoss(torch.autograd.Function):
    """Raises in backward before a gradient reaches the model."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise Boom


class TestBackwardRaises:
    @pytest.mark.parametrize("where", ["last.bias", "middle.weight", "first.weight"])
    @pytest.mark.parametrize("warm", [0, 2])
    def test_on_one_rank(self, where: str, warm: int) -> None:
        """Peers are told when that rank comes back, and both train on."""

        def run() -> tuple[Any, list[Gradients]]:
            ddp = wrap(warm)
            error = step_with_fault(ddp, where, (1,), Boom())
            return error, [good_step(ddp) for _ in range(3)]

        results = run_faulty(3, run)
        assert isinstance(results[1][0], Boom)
        for rank in (0, 2):
            error = results[rank][0]
            assert isinstance(error, PeerFailedError)
            assert error.rank == 1
            assert "rank 1: its backward pass raised an exception" in str(error)
            assert "rank 0" not in str(error)
            assert "run the step again on every rank" in str(error)
        for _, steps in results:
            for found in steps:
                torch.testing.assert_close(found, expected(3))

    @pytest.mark.parametrize(
        "options",
        [
            {"norm": True},
            {"find_unused_parameters": True},
            {"static_graph": True},
            {"gradient_as_bucket_view": False},
        ],
        ids=str,
    )
    @pytest.mark.parametrize("warm", [0, 2])
    def test_with_other_options(self, options: dict[str, Any], warm: int) -> None:
        def run() -> tuple[Any, Gradients]:
            ddp = wrap(warm, **options)
            error = step_with_fault(ddp, "middle.weight", (0,), Boom())
            return error, good_step(ddp)

        (boom, first), (peer, second) = run_faulty(2, run)
        assert isinstance(boom, Boom)
        assert isinstance(peer, PeerFailedError)
        assert peer.rank == 0
        for found in (first, second):
            torch.testing.assert_close(found, expected(2, options.get("norm", False)))

    def test_with_a_communication_hook(self) -> None:
        def mean(state, bucket):  # type: ignore[no-untyped-def]
            buffer = bucket.buffer().div_(dist.get_world_size())
            future = dist.all_reduce(buffer, async_op=True).get_future()
            return future.then(lambda work: work.value()[0])

        def run() -> tuple[Any, Gradients]:
            ddp = wrap(0)
            ddp.register_comm_hook(None, mean)
            good_step(ddp)
            good_step(ddp)
            ddp.zero_grad()
            error = step_with_fault(ddp, "middle.weight", (1,), Boom())
            return error, good_step(ddp)

        (peer, first), (boom, second) = run_faulty(2, run)
        assert isinstance(boom, Boom)
        assert isinstance(peer, PeerFailedError)
        for found in (first, second):
            torch.testing.assert_close(found, expected(2))

    def test_while_weighted(self) -> None:
        def run() -> tuple[Any, Gradients]:
            ddp = wrap(2)
            with ddp.weighted(1 + dist.get_rank()):
                error = step_with_fault(ddp, "middle.weight", (1,), Boom())
            return error, good_step(ddp)

        (peer, first), (boom, second) = run_faulty(2, run)
        assert isinstance(boom, Boom)
        assert isinstance(peer, PeerFailedError)
        for found in (first, second):
            torch.testing.assert_close(found, expected(2))

    def test_while_missing_gradients_are_waited_for(self) -> None:
        """Torch's timing, but not torch's hang: all ranks get a StepError and train on."""

        def run() -> tuple[Any, BaseException | None, Gradients]:
            rank = dist.get_rank()
            ddp = wrap(2, missing_gradients="wait")
            error = step_with_fault(ddp, "middle.weight", (1,), Boom())
            forward = caught(lambda: ddp(batch(rank))) if rank == 1 else None
            return error, forward, good_step(ddp)

        (peer, _, first), (boom, forward, second) = run_faulty(2, run)
        assert isinstance(boom, Boom)
        assert forward is None or isinstance(forward, StepError)
        assert isinstance(peer, StepError)
        for found in (first, second):
            torch.testing.assert_close(found, expected(2))

    def test_on_all_ranks(self) -> None:
        def run() -> tuple[Any, Gradients]:
            ddp = wrap(2)
            error = step_with_fault(ddp, "middle.weight", (0, 1), Boom())
            return error, good_step(ddp)

        for error, found in run_faulty(2, run):
            assert isinstance(error, Boom)
            torch.testing.assert_close(found, expected(2))

    def test_on_all_ranks_at_different_places(self) -> None:
        def run() -> tuple[Any, Gradients]:
            ddp = wrap(2)
            where = ("last.weight", "first.weight")[dist.get_rank()]
            error = step_with_fault(ddp, where, (0, 1), Boom())
            return error, good_step(ddp)

        for error, found in run_faulty(2, run):
            assert isinstance(error, Boom)
            torch.testing.assert_close(found, expected(2))

    def test_twice_in_a_row(self) -> None:
        def run() -> tuple[list[Any], Gradients]:
            ddp = wrap(2)
            errors = []
            for where in ("middle.weight", "first.weight"):
                errors.append(step_with_fault(ddp, where, (1,), Boom()))
                ddp.zero_grad()
            return errors, good_step(ddp)

        (peers, first), (booms, second) = run_faulty(2, run)
        assert [type(error) for error in booms] == [Boom, Boom]
        assert [type(error) for error in peers] == [PeerFailedError, PeerFailedError]
        for found in (first, second):
            torch.testing.assert_close(found, expected(2))

    def test_behind_the_last_gradient(self) -> None:
        """All buckets are on their way: peers have a good step, and the next one is good too."""

        def run() -> tuple[BaseException | None, Gradients]:
            ddp = wrap(2)
            x = batch(dist.get_rank(), requires_grad=True)

            def hook(gradient: torch.Tensor) -> None:
                raise Boom

            if dist.get_rank() == 1:
                x.register_hook(hook)
            error = caught(lambda: ddp(x).square().sum().backward())
            return error, good_step(ddp)

        (peer, first), (boom, second) = run_faulty(2, run)
        assert isinstance(boom, Boom)
        assert peer is None or isinstance(peer, PeerFailedError)
        for found in (first, second):
            torch.testing.assert_close(found, expected(2))

    def test_before_any_gradient_on_all_ranks(self) -> None:
        def run() -> tuple[BaseException | None, Gradients]:
            ddp = wrap(2)
            error = caught(lambda: FailingLoss.apply(ddp(batch(0))).backward())
            return error, good_step(ddp)

        for error, found in run_faulty(2, run):
            assert isinstance(error, Boom)
            torch.testing.assert_close(found, expected(2))

    def test_before_any_gradient_on_one_rank_that_tries_again(self) -> None:
        """The model's backward never began there, so its second try belongs to the same step."""

        def run() -> list[Gradients]:
            ddp = wrap(2)
            if dist.get_rank() == 1:
                error = caught(lambda: FailingLoss.apply(ddp(batch(1))).backward())
                assert isinstance(error, Boom)
            return [good_step(ddp) for _ in range(2)]

        for steps in run_faulty(2, run):
            for found in steps:
                torch.testing.assert_close(found, expected(2))

    def test_under_no_sync(self) -> None:
        """Nothing was to be reduced, so peers are not concerned."""

        def run() -> tuple[Any, Gradients]:
            ddp = wrap(2)
            with ddp.no_sync():
                error = step_with_fault(ddp, "middle.weight", (1,), Boom())
            return error, good_step(ddp)

        (fine, first), (boom, second) = run_faulty(2, run)
        assert fine is None
        assert isinstance(boom, Boom)
        for found in (first, second):
            torch.testing.assert_close(found, expected(2))
