"""Faults at every labelled point of every collective: nobody hangs, everybody is told.

Every fault is seen to have fired. The ranks are real processes (``worker_pool.py``); after each
fault the survivors must have nothing left of the group.
"""

from __future__ import annotations

import json
import platform
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.native.extension import missing_reason, native
from tests.shm import jobs
from tests.shm.worker_pool import RankResult, WorkerPool, with_workers

pytestmark = pytest.mark.skipif(missing_reason() is not None, reason=str(missing_reason()))

POINTS = {
    name.removeprefix("POINT_"): value
    for name, value in (vars(native).items() if native else ())
    if name.startswith("POINT_")
}
# (kind, elements)
TINY = [
    (name, jobs.TINY)
    for name in (
        "barrier",
        "all_reduce",
        "reduce",
        "broadcast",
        "all_gather",
        "gather",
        "scatter",
        "reduce_scatter",
        "all_to_all",
    )
]
STAGED = [
    (name, jobs.STAGED)
    for name in ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_to_all")
]
IN_ARENA = [
    (f"{name}_in_arena", jobs.STAGED)
    for name in ("all_reduce", "reduce_to_leaders", "copy_from_leaders")
]
EVERY = [*TINY, *STAGED, *IN_ARENA]
# Points that not every kind of collective passes.
ONLY = {
    "REDUCING": {"all_reduce", "reduce", "reduce_scatter", "reduce_to_leaders"},
    "TAKING": {"all_gather", "gather", "all_to_all", "copy_from_leaders"},
}


def passes(kind: str, count: int, point: str) -> bool:
    name = kind.removesuffix("_in_arena")
    is_staged = count == jobs.STAGED and kind in ("all_reduce", "reduce")
    return name in ONLY.get(point, {name}) or (point == "TAKING" and is_staged)


Record = tuple[str, int, str, int, list[RankResult]]


def play_faults(
    workers: WorkerPool,
    kinds: list[tuple[str, int]],
    points: list[str],
    action: int,
    timeout_s: float,
) -> list[Record]:
    """One job for each kind at each point; with two and three ranks in turn."""
    records = []
    for kind, count in kinds:
        for point in points:
            if passes(kind, count, point):
                world = 2 + len(records) % 2
                fault = (POINTS[point], 1, action, 0)
                for longer in (1, 3, 10, 100):
                    allowed_s = timeout_s * longer
                    results = workers.run(world, jobs.with_fault, kind, count, fault, allowed_s)
                    if is_killed(results) or is_clear(results):
                        break
                records.append((kind, count, point, world, results))
    return records


def is_killed(results: list[RankResult]) -> bool:
    """Say whether the fault has fired; a victim that is to die asleep may have had no rest."""
    return results[jobs.ROOT].signal == signal.SIGKILL


def is_clear(results: list[RankResult]) -> bool:
    """Say whether only the stopped rank was late; on a busy machine another may be, too."""
    if any(each.signal for each in results):
        return False
    errors = [each.value["error"] or {} for each in results]
    fired = results[jobs.ROOT].value["fired"]
    return bool(fired) and all(error.get("missing") == (jobs.ROOT,) for error in errors)


class TestKilled:
    """SIGKILL: every other rank raises PeerLostError, long before the deadline."""

    @pytest.mark.parametrize(
        "kinds",
        [
            pytest.param(TINY, id="tiny"),
            pytest.param(STAGED, id="staged", marks=pytest.mark.slow),
            pytest.param(IN_ARENA, id="arena", marks=pytest.mark.slow),
        ],
    )
    def test_at_every_point(self, kinds: list[tuple[str, int]]) -> None:
        found = with_workers(play_faults, kinds, list(POINTS), native.FAULT_KILL, 60.0)
        assert len(found) >= 24
        for kind, count, point, world, results in found:
            where = f"{kind} of {count} at {point}, {world} ranks: {results}"
            victim = results[jobs.ROOT]
            assert victim.signal == signal.SIGKILL, where
            for rank, survivor in enumerate(results):
                if rank != jobs.ROOT:
                    assert survivor.left == [], where
                    self.check(survivor.value["error"], victim.pid, where)

    @pytest.mark.alone
    def test_within_half_a_second(self) -> None:
        found = with_workers(play_faults, TINY, list(POINTS), native.FAULT_KILL, 60.0)
        times_s = sorted(
            each.value["error"]["took_s"] for *_, results in found for each in results if each.value
        )
        # A machine that is busy with something else may be late once.
        assert times_s[len(times_s) * 49 // 50] < 0.5, times_s

    def check(self, error: dict[str, Any], pid: int, where: str) -> None:
        assert error["type"] == "PeerLostError", where
        assert (error["rank"], error["pid"]) == (jobs.ROOT, pid), where
        assert error["host"] == platform.node(), where
        kind = where.split()[0].removesuffix("_in_arena")
        assert error["operation"].startswith(f"{kind} #"), where
        assert f"rank 1 (pid {pid} on {platform.node()}) has died" in error["text"], where
        assert "make a new one" in error["text"], where


class TestStopped:
    """SIGSTOP: CollectiveTimeoutError at the deadline, and an error for the stopped one too."""

    @pytest.mark.parametrize(
        ("kinds", "points"),
        [
            pytest.param([("all_reduce", jobs.TINY)], list(POINTS), id="tiny"),
            pytest.param(
                [("all_reduce", jobs.STAGED)], list(POINTS), id="staged", marks=pytest.mark.slow
            ),
            pytest.param(IN_ARENA[:1], list(POINTS), id="arena", marks=pytest.mark.slow),
            pytest.param(TINY, ["DATA_PUT"], id="every"),
            pytest.param([*STAGED, *IN_ARENA], ["DATA_PUT"], id="large", marks=pytest.mark.slow),
        ],
    )
    def test_at_every_point(self, kinds: list[tuple[str, int]], points: list[str]) -> None:
        found = with_workers(play_faults, kinds, points, native.FAULT_STOP, 0.3)
        assert len(found) >= 8
        for kind, count, point, world, results in found:
            where = f"{kind} of {count} at {point}, {world} ranks: {results}"
            assert results[jobs.ROOT].value["fired"] == 1, where
            for rank, each in enumerate(results):
                assert (each.signal, each.left) == (0, []), where
                error = each.value["error"]
                assert error["type"] == "CollectiveTimeoutError", where
                if rank != jobs.ROOT:
                    self.check(error, kind.removesuffix("_in_arena"), point, where)

    def check(self, error: dict[str, Any], kind: str, point: str, where: str) -> None:
        assert error["missing"] == (jobs.ROOT,), where
        assert error["rank"] == jobs.ROOT, where
        assert error["took_s"] > 0.25, where
        told = r"In no collective for \d\.\d s; its last was" if point == "BEGIN" else r"In"
        last = r"" if point == "BEGIN" else r"[^.]* for \d\.\d s\."
        pattern = rf"rank 1 \(pid \d+ on \S+\), stopped: {told} (barrier|{kind}) #\d+{last}"
        assert re.search(pattern, error["text"]), where


class TestDelayed:
    def test_at_every_point(self) -> None:
        """Right results; and every point that a kind has was passed."""

        def part(workers: WorkerPool) -> list[RankResult]:
            names = tuple({kind for kind, _ in EVERY})
            return workers.run(3, jobs.delays, names, tuple(POINTS.values()))

        results = with_workers(part)
        assert [each.left for each in results] == [[], [], []]
        silent = {
            (kind, point)
            for kind, _ in EVERY
            for point in POINTS
            if not any(passes(kind, count, point) for count in (jobs.TINY, jobs.STAGED))
        }
        points = {value: name for name, value in POINTS.items()}
        found = {(kind, points[point]) for kind, point in results[jobs.ROOT].value}
        # Whether a rank sleeps depends on how late the others are.
        assert {each for each in found if each[1] != "ASLEEP"} == silent


class TestManyRounds:
    """Thousands of fresh groups: see ``bare.py``."""

    @staticmethod
    def run(rounds: int) -> dict[str, Any]:
        script = Path(__file__).with_name("bare.py")
        command = [sys.executable, str(script), native.__file__, str(rounds), "11"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stderr[-3000:]
        found: dict[str, Any] = json.loads(done.stdout)
        assert found["wrong"] == []
        assert sum(found["fired"].values()) >= rounds * 5 // 8
        return found

    def test_hundreds(self) -> None:
        self.run(200)

    @pytest.mark.alone
    def test_thousands(self) -> None:
        found = self.run(2400)
        for point in POINTS.values():
            for action in ("KILL", "STOP", "DELAY"):
                assert found["fired"].get(f"{action} {point}", 0) >= 5, found
        # See `test_within_half_a_second`.
        assert found["late"] <= 24, found
        assert found["slowest_s"] < 3.0
