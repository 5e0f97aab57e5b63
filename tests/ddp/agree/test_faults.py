"""Faults in the middle of a step: nobody hangs, everybody is told, and training goes on.

Every fault reports that it fired, so that a test cannot pass because nothing happened.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline import DistributedDataParallel as DDP
from paceline.errors import HookResultError, PeerFailedError, PeerLostError, StepError
from paceline.testing import RanksFailedError, run_ranks
from paceline.testing.failures import Outcome

Gradients = dict[str, torch.Tensor]


class Boom(Exception):
    """The fault."""


class Net(nn.Module):
    """Gradients arrive from `last` to `first`. With a buffer, if asked for."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(4, 4)
        self.middle = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.fault: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.fault()
        return self.last(torch.tanh(self.middle(self.norm(self.first(x)))))


class FailingLoss(torch.autograd.Function):
    """Raises in backward before a gradient reaches the model."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise Boom


def run_faulty(ranks: int, run: Callable[[], Any]) -> list[Any]:
    """Give up early: what hangs here hangs for ever."""
    return run_ranks(ranks, run)


def batch(rank: int, requires_grad: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(3, 4, generator=generator).requires_grad_(requires_grad)


def gradients(ddp: DDP) -> Gradients:
    return {name: p.grad.clone() for name, p in ddp.module.named_parameters()}


def good_step(ddp: DDP) -> Gradients:
    ddp.zero_grad()
    ddp(batch(dist.get_rank())).square().sum().backward()
    return gradients(ddp)


def expected(ranks: int, norm: bool = False) -> Gradients:
    net = Net(norm)
    for rank in range(ranks):
        (net(batch(rank)).square().sum() / ranks).backward()
    return {name: p.grad for name, p in net.named_parameters()}


def wrap(warm: int, **options: Any) -> DDP:
    """One bucket per parameter, once `warm` good steps have been run."""
    ddp = DDP(Net(options.pop("norm", False)), bucket_cap_mb=1e-6, **options)
    for _ in range(warm):
        good_step(ddp)
    ddp.zero_grad()
    return ddp


def raise_in_backward(ddp: DDP, where: str, error: BaseException) -> list[str]:
    """Let the gradient of one parameter raise, once. The list says whether it has."""
    fired: list[str] = []

    def hook(gradient: torch.Tensor) -> None:
        if not fired:
            fired.append(where)
            raise error

    ddp.module.get_parameter(where).register_hook(hook)
    return fired


def caught(action: Callable[[], Any]) -> BaseException | None:
    try:
        action()
    except BaseException as error:
        return error
    return None


def step_with_fault(ddp: DDP, where: str, on: tuple[int, ...], error: BaseException) -> Any:
    """Run a step that raises on some ranks; return what each rank caught, checked to have fired."""
    rank = dist.get_rank()
    fired = raise_in_backward(ddp, where, error) if rank in on else [where]
    found = caught(lambda: ddp(batch(rank)).square().sum().backward())
    assert fired == [where]
    return found


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


class TestForwardRaises:
    def test_on_one_rank_that_tries_again(self) -> None:
        def run() -> list[Gradients]:
            ddp = wrap(2)

            def fault() -> None:
                ddp.module.fault = lambda: None
                raise Boom

            if dist.get_rank() == 1:
                ddp.module.fault = fault
                assert isinstance(caught(lambda: ddp(batch(1))), Boom)
            return [good_step(ddp) for _ in range(2)]

        for steps in run_faulty(2, run):
            for found in steps:
                torch.testing.assert_close(found, expected(2))

    def test_on_all_ranks(self) -> None:
        def run() -> Gradients:
            ddp = wrap(2, norm=True)

            def fault() -> None:
                ddp.module.fault = lambda: None
                raise Boom

            ddp.module.fault = fault
            assert isinstance(caught(lambda: ddp(batch(0))), Boom)
            return good_step(ddp)

        for found in run_faulty(2, run):
            torch.testing.assert_close(found, expected(2, norm=True))


class Interrupt(BaseException):
    """Like KeyboardInterrupt: not an Exception."""


class TestInterrupts:
    @pytest.mark.parametrize("kind", [KeyboardInterrupt, Interrupt])
    def test_in_a_gradient_hook(self, kind: type[BaseException]) -> None:
        def run() -> tuple[Any, Gradients]:
            ddp = wrap(2)
            error = step_with_fault(ddp, "middle.weight", (1,), kind())
            return error, good_step(ddp)

        (peer, first), (interrupt, second) = run_faulty(2, run)
        assert isinstance(interrupt, kind)
        assert isinstance(peer, PeerFailedError)
        assert peer.rank == 1
        for found in (first, second):
            torch.testing.assert_close(found, expected(2))

    def test_in_a_communication_hook(self) -> None:
        """It reaches the user, on every rank on which it happened; then training goes on."""

        def hook(interrupts, bucket):  # type: ignore[no-untyped-def]
            if interrupts:
                raise interrupts.pop()
            buffer = bucket.buffer().div_(dist.get_world_size())
            future = dist.all_reduce(buffer, async_op=True).get_future()
            return future.then(lambda work: work.value()[0])

        def run() -> tuple[BaseException | None, Gradients]:
            ddp = wrap(0)
            interrupts: list[BaseException] = []
            ddp.register_comm_hook(interrupts, hook)
            good_step(ddp)
            good_step(ddp)
            interrupts.append(KeyboardInterrupt())
            ddp.zero_grad()
            error = caught(lambda: ddp(batch(0)).sum().backward())
            assert not interrupts
            return error, good_step(ddp)

        for error, found in run_faulty(2, run):
            assert isinstance(error, (KeyboardInterrupt, HookResultError))
            torch.testing.assert_close(found, expected(2))


class TestRankDies:
    """A rank is killed; all others say which, and what they were doing, whatever it travels over.

    With three ranks gloo itself sometimes misses that a connection was closed (plain all_reduce
    does, too): the group's time-out is longer than these tests.
    """

    @staticmethod
    def survivors(tmp_path: Path, run: Callable[[], None], ranks: int = 3) -> list[PeerLostError]:
        """Run until rank 1 is dead; return what the others raised, and ended by."""

        def record() -> None:
            if dist.get_rank() == 1:
                (tmp_path / "pid").write_text(str(os.getpid()))
            error = caught(run)
            assert error is not None
            (tmp_path / f"{dist.get_rank()}").write_bytes(pickle.dumps(error))
            raise error

        with pytest.raises(RanksFailedError) as failed:
            run_ranks(ranks, record, timeout_s=60, grace_s=60)
        outcomes = {failure.rank: failure.outcome for failure in failed.value.failures}
        assert outcomes.pop(1) is Outcome.EXITED
        assert set(outcomes.values()) == {Outcome.RAISED}, failed.value
        errors = [pickle.loads((tmp_path / f"{rank}").read_bytes()) for rank in sorted(outcomes)]
        for error in errors:
            assert isinstance(error, PeerLostError), error
            assert (error.rank, error.pid) == (1, int((tmp_path / "pid").read_text()))
            assert error.operation
            assert error.operation in str(error)
        return errors

    def test_in_backward(self, tmp_path: Path) -> None:
        def run() -> None:
            ddp = wrap(2, transport="c10d")
            if dist.get_rank() == 1:
                ddp.module.middle.weight.register_hook(lambda _: die())
            ddp(batch(0)).sum().backward()

        for rank, error in zip((0, 2), self.survivors(tmp_path, run), strict=True):
            assert error.operation.startswith("all_reduce of bucket")
            assert f"Rank {rank}" in str(error)
            assert "all_reduce over the process group" in str(error)
            assert f"rank 1 (pid {error.pid} on {error.host}) has died" in str(error)

    def test_in_backward_in_shared_memory(self, tmp_path: Path) -> None:
        """The error says who has died."""

        def run() -> None:
            ddp = wrap(2, transport="shm")
            if dist.get_rank() == 1:
                ddp.module.middle.weight.register_hook(lambda _: die())
            ddp(batch(0)).sum().backward()

        errors = self.survivors(tmp_path, run)
        for rank, error in zip((0, 2), errors, strict=True):
            assert re.fullmatch(r"all_reduce of bucket \d+ in step 2", error.operation)
            assert str(error).startswith(f"{error.operation}: Rank {rank}: all_reduce #")
            assert "has died" in str(error)

    @pytest.mark.parametrize("transport", ["shm", "c10d"])
    @pytest.mark.parametrize("warm", [0, 1, 2])
    def test_before_backward(self, tmp_path: Path, warm: int, transport: str) -> None:
        """The second step's backward begins with an agreement on buckets: it fails there."""

        def run() -> None:
            ddp = wrap(warm, transport=transport)
            loss = ddp(batch(0)).sum()
            if dist.get_rank() == 1:
                die()
            loss.backward()

        self.survivors(tmp_path, run)

    @pytest.mark.parametrize("transport", ["shm", "c10d"])
    def test_with_a_communication_hook(self, tmp_path: Path, transport: str) -> None:
        def hook(group, bucket):  # type: ignore[no-untyped-def]
            return group.allreduce([bucket.buffer()]).get_future()

        def run() -> None:
            ddp = wrap(0, transport=transport)
            ddp.register_comm_hook(ddp.process_group, hook)
            good_step(ddp)
            good_step(ddp)
            if dist.get_rank() == 1:
                ddp.module.middle.weight.register_hook(lambda _: die())
            ddp(batch(0)).sum().backward()

        self.survivors(tmp_path, run)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
