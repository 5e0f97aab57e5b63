"""The coordinator is killed or stopped: ranks go on, also if one of them dies meanwhile."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.elastic.jobs import JobOnSharedServer, check, run_job


def do_once_after_a_step(
    out: Path, act: Callable[[JobOnSharedServer], None]
) -> Callable[[JobOnSharedServer], None]:
    """Act as soon as a step is committed; the job's time to wait is no longer than 0.1 s."""
    acted: list[None] = []

    def on_wait(job: JobOnSharedServer) -> None:
        if not acted and list(out.glob("digests-*")):
            acted.append(act(job))

    return on_wait


def pid_of(job: JobOnSharedServer) -> int:
    assert job._keeper is not None
    return job._keeper.pid


def test_training_goes_on_and_does_not_notice(tmp_path: Path) -> None:
    def kill(job: JobOnSharedServer) -> None:
        pids.append(pid_of(job))
        os.kill(pids[0], signal.SIGKILL)

    pids: list[int] = []
    on_wait = do_once_after_a_step(tmp_path / "out", kill)
    ended = run_job(tmp_path, on_wait=on_wait, pause_s=0.1)
    check(ended, faults=0, world=3)
    assert pids
    assert [event["epoch"] for event in ended.events()] == [0]


def test_a_rank_dies_meanwhile(tmp_path: Path) -> None:
    def kill_both(job: JobOnSharedServer) -> None:
        os.kill(pid_of(job), signal.SIGKILL)
        killed.append(next(iter(job._members.values())).child.pid)
        os.kill(killed[0], signal.SIGKILL)

    killed: list[int] = []
    on_wait = do_once_after_a_step(tmp_path / "out", kill_both)
    ended = run_job(tmp_path, on_wait=on_wait, pause_s=0.1, hold_s=60.0)
    check(ended, faults=0, world=3)
    assert killed
    assert f"(pid {killed[0]}) was killed by SIGKILL" in ended.events()[-1]["why"]


@pytest.mark.slow
def test_a_launcher_that_stands_still_ends_nothing(tmp_path: Path) -> None:
    """For more than two leases; then a rank dies, and is replaced."""

    def stand_still(job: JobOnSharedServer) -> None:
        pids.append(pid_of(job))
        time.sleep(5.0)

    def on_wait(job: JobOnSharedServer) -> None:
        if pids and not stood and not job._agent.silent_s:  # type: ignore[union-attr]
            stood.append(pid_of(job))
        stop(job)

    pids: list[int] = []
    stood: list[int] = []
    stop = do_once_after_a_step(tmp_path / "out", stand_still)
    ended = run_job(
        tmp_path, on_wait=on_wait, pause_s=0.1, steps=100, lease_s=2.0,
        faults=[("kill", "forward", 80, 1)], hold_s=60.0,
    )  # fmt: skip
    check(ended, faults=1, world=3, steps=100)
    assert pids == stood, "the coordinator was killed, though it had answered"
    assert [event["epoch"] for event in ended.events()] == [0, 1]


@pytest.mark.slow
def test_it_is_killed_again_and_again_in_recovery(tmp_path: Path) -> None:
    """At each look of the launcher, from the death of a rank on."""

    def kill(job: JobOnSharedServer) -> None:
        has_fired = (tmp_path / "out" / "fired-0").exists()
        if has_fired and len(kills) < 8 and pid_of(job) not in kills and pid_of(job):
            kills.append(pid_of(job))
            os.kill(kills[-1], signal.SIGKILL)

    kills: list[int] = []
    ended = run_job(tmp_path, faults=[("kill", "forward", 5, 1)], on_wait=kill, pause_s=0.05,
                    steps=40)  # fmt: skip
    check(ended, faults=1, world=3, steps=40)
    assert len(kills) == 8


@pytest.mark.slow
def test_a_stopped_one_is_replaced(tmp_path: Path) -> None:
    def stop(job: JobOnSharedServer) -> None:
        pids.append(pid_of(job))
        os.kill(pids[0], signal.SIGSTOP)

    pids: list[int] = []
    on_wait = do_once_after_a_step(tmp_path / "out", stop)
    ended = run_job(
        tmp_path, on_wait=on_wait, pause_s=0.5, steps=30, lease_s=4.0,
        faults=[("kill", "forward", 10, 1)], hold_s=60.0,
    )  # fmt: skip
    check(ended, faults=1, world=3, steps=30)
    assert pids
