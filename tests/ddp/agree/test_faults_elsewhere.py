"""A forward that raises, an interrupt, a rank that dies: nobody hangs, everybody is told."""

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

from paceline.errors import HookResultError, PeerFailedError, PeerLostError
from paceline.testing import RanksFailedError, run_ranks
from paceline.testing.failures import Outcome
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
