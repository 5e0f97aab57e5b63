"""Abort, mismatch, leaving, fork, Ctrl-C, odd sizes: right, or a clear error; nothing is left."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.native.extension import missing_reason
from tests.shm import jobs
from tests.shm.attach import life_jobs
from tests.shm.worker_pool import RankResult, WorkerPool, with_workers

pytestmark = pytest.mark.skipif(missing_reason() is not None, reason=str(missing_reason()))


def run(world: int, job: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Do a job once; nobody may have died or left anything behind."""

    def part(workers: WorkerPool) -> list[RankResult]:
        return workers.run(world, job, *arguments)

    results = with_workers(part)
    assert [(each.signal, each.left) for each in results] == [(0, [])] * world
    return [each.value for each in results]


@pytest.mark.parametrize("by", [0, 2])
@pytest.mark.parametrize("blocking", [True, False])
def test_abort_releases_everybody(blocking: bool, by: int) -> None:
    """From another thread; by a rank that waits, and by one that does not."""
    found = run(3, life_jobs.aborted, blocking, by)
    for rank in (1, 2):
        error = found[rank]["error"]
        assert error["type"] == "GroupAbortedError"
        assert error["rank"] == by
        who = "this rank" if rank == by else f"rank {by} (pid"
        assert f"the group was aborted by {who}" in error["text"]
    for each in found:
        assert each["after"]["type"] == "GroupAbortedError"


MISMATCHES = {
    "size": ("all_reduce #1 of 4 float32 (sum)", "all_reduce #1 of 5 float32 (sum)"),
    "large size": ("of 700000 float32", "of 700001 float32"),
    "dtype": ("all_reduce #1 of 4 float32", "all_reduce #1 of 4 float64"),
    "op": ("of 4 float32 (sum)", "of 4 float32 (max)"),
    "kind": ("all_reduce #1 of 4 float32 (sum)", "barrier #1"),
    "root": ("broadcast #1 of 4 float32 from rank 0", "broadcast #1 of 4 float32 from rank 1"),
    "splits": ("rank 1 sends 16 bytes to rank 0, which expects 12", ""),
}


def test_mismatches_are_told_to_all_and_the_group_goes_on() -> None:
    def part(workers: WorkerPool) -> dict[str, list[RankResult]]:
        return {case: workers.run(3, life_jobs.mismatched, case) for case in MISMATCHES}

    for case, results in with_workers(part).items():
        for rank, each in enumerate(results):
            error = each.value["error"]
            assert error["type"] == "CollectiveMismatchError", (case, each)
            assert error["text"].startswith(f"Rank {rank}: ranks do not agree on")
            first, second = MISMATCHES[case]
            told = error["text"].partition(": ")[2]
            assert first in told, told
            assert second in told, told
            assert case == "splits" or ("rank 0 brought" in told and "rank 1 brought" in told)
            assert each.value["works"] == [None, None, None]
            assert each.left == []


@pytest.mark.parametrize("blocking", [True, False])
def test_a_rank_that_leaves_is_named(blocking: bool) -> None:
    found = run(3, life_jobs.left_by_one, blocking)
    for rank in (0, 2):
        assert found[rank]["type"] == "PeerLostError"
        assert found[rank]["rank"] == 1
        assert "has left the group" in found[rank]["text"]


def test_destroying_a_group_ends_the_wait_of_another_thread() -> None:
    found = run(2, life_jobs.closed_under_way)[0]
    assert found["waited"]["type"] == "GroupClosedError"
    assert "this rank destroyed the group meanwhile" in found["waited"]["text"]
    assert found["after"]["type"] == "GroupClosedError"


def test_a_forked_child_has_no_part_and_the_parent_goes_on() -> None:
    for names, errors in run(2, life_jobs.forked):
        assert names == ["GroupClosedError"] * 4
        assert errors == [None, None]


@pytest.mark.parametrize("blocking", [True, False])
def test_control_c_ends_a_wait(blocking: bool) -> None:
    first, second = run(2, life_jobs.interrupted, blocking)
    assert first["error"]["type"] == "KeyboardInterrupt"
    assert first["after"]["type"] == second["error"]["type"] == "GroupAbortedError"
    assert "interrupted" in second["error"]["text"]


def test_control_c_does_not_take_the_tensor_of_a_queued_call() -> None:
    found = run(2, life_jobs.interrupted_behind_another)[0]
    assert found["error"]["type"] == "KeyboardInterrupt"
    assert found["kept"] == 2


def test_a_group_that_is_dropped_in_the_middle_leaves_nothing() -> None:
    assert run(2, life_jobs.dropped) == [None, None]


def test_an_exception_leaves_nothing() -> None:
    _, peer = run(2, life_jobs.raised)
    assert peer["type"] == "PeerLostError"
    assert "has left the group" in peer["text"]


@pytest.mark.parametrize(
    ("how", "code"), [("return", 0), pytest.param("raise", 1, marks=pytest.mark.slow)]
)
def test_a_program_that_ends_without_closing(how: str, code: int) -> None:
    """The interpreter goes while a thread of the core waits: it ends, and as it was told to."""
    script = Path(__file__).with_name("leaves_open.py")
    command = [sys.executable, str(script), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == code, done.stderr
    assert f"rank 1 ended with {code}" in done.stdout
    lines = done.stderr.splitlines()
    told = [line for line in lines if line.startswith("Fatal") or "Error" in line.split(":")[0]]
    assert {line.strip() for line in told} <= {"raise ZeroDivisionError", "ZeroDivisionError"}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_sizes_that_nothing_divides(world: int) -> None:
    assert set(run(world, life_jobs.shapes)) == {13 * len(jobs.KIND_NAMES)}


def test_what_the_core_does_not_have_is_refused() -> None:
    for errors in run(2, life_jobs.impossible):
        assert [error["type"] for error in errors] == ["ValueError"] * 4


def _free_gib() -> float:
    text = Path("/proc/meminfo").read_text()
    return int(text.partition("MemAvailable:")[2].split()[0]) / (1 << 20)


@pytest.mark.slow
@pytest.mark.skipif(_free_gib() < 8, reason="needs 8 GiB of free memory")
def test_more_than_two_gib() -> None:
    """As many rounds as it takes, through a few slots: no memory of its own."""
    for found in run(2, life_jobs.huge, (1 << 31) + (1 << 20) + 77):
        assert found["grown_kib"] < 64 << 10
