"""Another host dies, or the link to it is cut: its ranks are named, long before any time-out."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline import DistributedDataParallel as DDP
from paceline.errors import PeerLostError
from paceline.testing import RanksFailedError
from paceline.testing.failures import Outcome
from paceline.testing.hosts import LINK, Hosts, hosts_unavailable_reason, run_on_hosts, test_hosts
from paceline.testing.namespaces import run_here

REASON = hosts_unavailable_reason()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(240),
    pytest.mark.alone,
]
TIMEOUT_S = 100.0


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with test_hosts(2) as found:
        yield found


def train_on(ddp: DDP) -> None:
    while True:
        ddp(torch.randn(4, 8)).sum().backward()


def train_until_lost(
    transport: str, norm: Any, fault: Any, folder: Path
) -> tuple[int | None, str, int, float]:
    """Two steps, the fault on rank 3, further steps; whom the error names, and after how long."""
    ddp = DDP(nn.Sequential(nn.Linear(8, 8), norm(8)), transport=transport)
    for _ in range(2):
        ddp(torch.randn(4, 8)).sum().backward()
    meet(folder)
    if dist.get_rank() == 3:
        fault()
    began_s = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        train_on(ddp)
    error = caught.value
    return error.rank, error.host, error.pid, time.monotonic() - began_s


def meet(folder: Path) -> None:
    """Wait for all ranks, but not over the link: it may be cut before the last has left."""
    (folder / f"met-{dist.get_rank()}").touch()
    until_s = time.monotonic() + TIMEOUT_S
    while len(list(folder.glob("met-*"))) < dist.get_world_size() and time.monotonic() < until_s:
        time.sleep(0.01)


def cut_link() -> None:
    """No packet gets through any more, and nobody is told."""
    run_here("ip", "link", "set", LINK, "down")


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_a_cut_link(hosts: Hosts, transport: str, tmp_path: Path) -> None:
    """gloo alone waits for its time-out."""
    arguments = (transport, nn.BatchNorm1d, cut_link, tmp_path)
    found = run_on_hosts(hosts, 2, train_until_lost, *arguments, timeout_s=TIMEOUT_S)
    for rank, (lost, host, pid, waited_s) in enumerate(found):
        assert lost in ((2, 3) if rank < 2 else (0, 1))
        assert host == f"test-host-{1 if rank < 2 else 0}"
        assert pid
        print(f"rank {rank}: rank {lost} on {host} after {waited_s:.1f} s")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_a_rank_that_is_killed_on_another_host(
    hosts: Hosts, transport: str, tmp_path: Path
) -> None:
    def run() -> None:
        found = train_until_lost(transport, nn.BatchNorm1d, die, tmp_path)
        (tmp_path / f"{dist.get_rank()}").write_text(f"{found[0]} {found[1]}")

    with pytest.raises(RanksFailedError) as failed:
        run_on_hosts(hosts, 2, run, timeout_s=TIMEOUT_S, grace_s=TIMEOUT_S / 2)
    outcomes = {failure.rank: failure.outcome for failure in failed.value.failures}
    assert outcomes[3] is Outcome.EXITED
    for rank in range(3):
        assert (tmp_path / f"{rank}").read_text() == "3 test-host-1", failed.value
