"""A group is closed in the middle of its own collective: it ends, wherever that was."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.errors import CollectiveError
from paceline.native.extension import missing_reason, native
from paceline.testing import run_ranks
from tests.shm.collectives import closing_jobs
from tests.shm.worker_pool import RankResult, WorkerPool, with_workers

pytestmark = [
    pytest.mark.skipif(missing_reason() is not None, reason=str(missing_reason())),
    pytest.mark.timeout(150),
]

POINTS = {
    name.removeprefix("POINT_"): value
    for name, value in (vars(native).items() if native else ())
    if name.startswith("POINT_")
}


@pytest.mark.parametrize("way", ["signal", "thread", "both"])
def test_at_every_point(way: str) -> None:
    """In a signal handler, as SIGTERM usually destroys the group; from a thread; from both."""

    def part(workers: WorkerPool) -> dict[str, list[RankResult]]:
        cases = {(name, name != "ASLEEP"): value for name, value in POINTS.items()}
        cases["ARRIVED", False] = POINTS["ARRIVED"]
        return {
            f"{name} {comes}": workers.run(2, closing_jobs.closed_at, value, way, comes)
            for (name, comes), value in cases.items()
        }

    for case, results in with_workers(part, timeout_s=140).items():
        assert [(each.signal, each.left) for each in results] == [(0, [])] * 2, case
        closer, peer = (each.value for each in results)
        assert closer["fired"], case
        assert closer["after"]["type"] == "GroupClosedError", case
        if closer["error"] is not None:
            assert closer["error"]["type"] == "GroupClosedError", (case, closer)
            assert "this rank destroyed the group meanwhile" in closer["error"]["text"]
        else:
            assert case.endswith("True"), case  # nobody came: it cannot have ended well
        if peer["error"] is not None:
            assert peer["error"]["type"] == "PeerLostError", (case, peer)
            assert "has left the group" in peer["error"]["text"]


def test_a_handler_may_not_wait_for_a_collective_inside_of_another() -> None:
    """It would wait for ever: the one before it goes on when the handler returns."""

    def part(workers: WorkerPool) -> list[RankResult]:
        return workers.run(2, closing_jobs.collective_in_handler)

    results = with_workers(part)
    found = results[0].value
    assert [error["type"] for error in found] == ["RuntimeError"] * 2
    assert all("signal handler" in error["text"] for error in found)


def _destroy_in_handler() -> Any:
    """SIGTERM, the usual clean-up, while a blocking collective waits."""
    rank = dist.get_rank()
    dist.barrier()
    if rank == 1:
        store = dist.distributed_c10d._get_default_store()
        store.wait(["struck"])
        # What rank 0 had brought counts: the first may end well, the second cannot.
        return [_caught(lambda: dist.all_reduce(torch.ones(3))) for _ in range(2)][1]
    group = dist.group.WORLD

    def strike() -> None:
        core = group._operations._group._core
        closing_jobs.poll(lambda: core.row(0).life == native.LIFE_WORKING)
        os.kill(os.getpid(), signal.SIGTERM)

    store = dist.distributed_c10d._get_default_store()
    thread = threading.Thread(target=strike)
    with closing_jobs.handling(dist.destroy_process_group):
        thread.start()
        error = _caught(lambda: dist.all_reduce(torch.ones(3)))
        thread.join()
    store.set("struck", "")
    return error


def _caught(action: Callable[[], Any]) -> str:
    try:
        action()
    except CollectiveError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_destroy_process_group_in_a_signal_handler() -> None:
    closer, peer = run_ranks(2, _destroy_in_handler, backend="paceline")
    assert closer.startswith("GroupClosedError: Rank 0: all_reduce #2 of 3 float32 (sum) was given")
    assert peer.startswith("PeerLostError: Rank 1:")
    assert "rank 0 (pid" in peer
    assert "has left the group" in peer
