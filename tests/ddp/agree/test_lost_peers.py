"""Whatever the wrapper sends, and wherever a rank dies or fails: the others name it, all of them.

The group's time-out is longer than these tests: nobody is helped by it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline import DistributedDataParallel as DDP
from paceline.ddp import torch_surface
from paceline.ddp.agree import peers
from paceline.errors import PeerFailedError, PeerLostError
from paceline.liveness.roster import PeerRoster
from paceline.nn import SyncBatchNorm
from paceline.shm.attach import handshake
from paceline.testing import RanksFailedError, run_ranks
from paceline.testing.failures import Outcome
from paceline.transport import choose

VICTIM = 1
RANKS = 3
TIMEOUT_S = 90.0


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def net(norm: Callable[[int], nn.Module]) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 6), norm(6), nn.ReLU(), nn.Linear(6, 2))


def step(ddp: DDP) -> None:
    ddp(torch.randn(3, 4)).sum().backward()
    ddp.zero_grad()


def survivors_name_the_victim(
    run: Callable[[], None], tmp_path: Any, *, stay: bool = False
) -> list[str]:
    """Run until the victim is dead; check what the others raise, and return it.

    Args:
        run: What each rank does.
        tmp_path: A directory.
        stay: Survivors live on after they have raised, with all their connections.
    """

    def record() -> None:
        rank = dist.get_rank()
        (tmp_path / f"pid{rank}").write_text(str(os.getpid()))
        with pytest.raises(PeerLostError) as caught:
            run()
        error, pid = caught.value, int((tmp_path / f"pid{VICTIM}").read_text())
        assert (error.rank, error.pid) == (VICTIM, pid), error
        assert error.host
        (tmp_path / f"named{rank}").write_text(str(error))
        while stay and len(list(tmp_path.glob("named*"))) < RANKS - 1:
            time.sleep(0.01)

    with pytest.raises(RanksFailedError) as failed:
        run_ranks(RANKS, record, timeout_s=TIMEOUT_S, grace_s=TIMEOUT_S)
    outcomes = {failure.rank: failure.outcome for failure in failed.value.failures}
    assert outcomes[VICTIM] is Outcome.EXITED
    named = sorted(tmp_path.glob("named*"))
    assert len(named) == RANKS - 1, failed.value
    return [path.read_text() for path in named]


@pytest.mark.parametrize("stay", [False, True], ids=["end", "stay"])
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, SyncBatchNorm])
class TestNorms:
    def test_in_forward(self, tmp_path: Any, norm: Any, transport: str, stay: bool) -> None:
        def run() -> None:
            ddp = DDP(net(norm), transport=transport)
            step(ddp)
            if dist.get_rank() == VICTIM:
                ddp.module[0].register_forward_hook(lambda *_: die())
            step(ddp)
            step(ddp)

        survivors_name_the_victim(run, tmp_path, stay=stay)

    def test_in_backward(self, tmp_path: Any, norm: Any, transport: str, stay: bool) -> None:
        def run() -> None:
            ddp = DDP(net(norm), transport=transport)
            step(ddp)
            if dist.get_rank() == VICTIM:
                ddp.module[3].weight.register_hook(lambda _: die())
            step(ddp)
            step(ddp)

        survivors_name_the_victim(run, tmp_path, stay=stay)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_in_join(tmp_path: Any, transport: str) -> None:
    """One survivor has joined, the other has not."""

    def run() -> None:
        ddp = DDP(net(nn.BatchNorm1d), transport=transport)
        with ddp.join():
            for number in range(1 if dist.get_rank() == 0 else 5):
                if dist.get_rank() == VICTIM and number == 3:
                    die()
                step(ddp)

    survivors_name_the_victim(run, tmp_path)


POINTS: dict[str, tuple[Any, str]] = {
    "before the first gather": (PeerRoster, "meet"),
    "before the transports are compared": (choose, "_check_agreement"),
    "before it hands in": (handshake.Handshake, "send_own"),
    "before it maps": (handshake.Handshake, "map_all"),
    "before it makes its core": (handshake, "_make_core"),
    "before models are compared": (peers, "verify_same_model"),
    "before the model is broadcast": (torch_surface, "broadcast_module"),
}


@pytest.mark.parametrize("point", POINTS)
def test_in_the_constructor(tmp_path: Any, point: str) -> None:
    def run() -> None:
        where, name = POINTS[point]
        if dist.get_rank() == VICTIM:
            setattr(where, name, lambda *_, **__: die())
        DDP(net(nn.BatchNorm1d), transport="shm")

    survivors_name_the_victim(run, tmp_path)


class TestFailsInTheConstructor:
    @pytest.mark.parametrize("point", POINTS)
    def test_peers_are_told(self, point: str) -> None:
        """The rank lives on, so that nobody sees it die."""

        def run() -> str:
            where, name = POINTS[point]
            if dist.get_rank() == VICTIM:

                def fail(*_: Any, **__: Any) -> None:
                    raise RuntimeError("no luck")

                setattr(where, name, fail)
            with pytest.raises((RuntimeError, PeerFailedError)) as caught:
                DDP(net(nn.BatchNorm1d), transport="shm")
            # Nobody ends before all have raised: it is not the end of a process that is seen.
            dist.group.WORLD.get_group_store().set(f"done{dist.get_rank()}", "")
            dist.group.WORLD.get_group_store().wait([f"done{rank}" for rank in range(RANKS)])
            if dist.get_rank() != VICTIM:
                assert isinstance(caught.value, (PeerFailedError, PeerLostError))
                assert caught.value.rank == VICTIM
            return str(caught.value)

        for text in run_ranks(RANKS, run, timeout_s=TIMEOUT_S):
            assert "no luck" in text

    def test_an_argument_that_is_wrong_on_one_rank(self) -> None:
        def run() -> str:
            bad = {"nonfinite": "explode"} if dist.get_rank() == VICTIM else {}
            with pytest.raises((ValueError, PeerFailedError)) as caught:
                DDP(net(nn.BatchNorm1d), **bad)
            with contextlib.suppress(AttributeError):
                assert caught.value.rank in (VICTIM, None)
            return str(caught.value)

        for text in run_ranks(RANKS, run, timeout_s=TIMEOUT_S):
            assert "explode" in text


class TestNoMemory:
    """A rank that cannot share memory says so at once, and all go on without."""

    @pytest.mark.parametrize("limit", ["descriptors", "file size"])
    @pytest.mark.parametrize("victim", [0, 1])
    def test_the_reason_is_that_rank(self, limit: str, victim: int) -> None:
        def run() -> tuple[str, str]:
            if dist.get_rank() == victim:
                self._lower(limit)
            with pytest.warns() if dist.get_rank() == 0 else contextlib.nullcontext():
                ddp = DDP(net(nn.BatchNorm1d))
            step(ddp)
            return ddp._transport.name, ddp._transport.reason

        for name, reason in run_ranks(RANKS, run, timeout_s=TIMEOUT_S):
            assert name == "c10d:gloo"
            assert reason.startswith(f"rank {victim} could not share memory")
            assert {"descriptors": "ulimit -n", "file size": "File too large"}[limit] in reason

    @staticmethod
    def _lower(limit: str) -> None:
        if limit == "file size":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
            return
        used = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 6, used + 6))
