"""Every kind of fault at every point of a step, on one host; each asserts that its fault fired.

One job for each kind and backend, with one fault after the other: starting ranks takes longer than
what is tried. Each fault comes steps after the one before, so it finds a job that trains. After
every commit all ranks note a hash of their whole state; these must be the same.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.elastic.jobs import Ended, Fault, JobOnSharedServer, check, run_job

POINTS = ("construction", "forward", "bucket", "between", "optimizer", "commit", "recovery")
# Where survivors are blocked besides: a hook's collective, dist.barrier. SyncBatchNorm is anyway.
BLOCKED = (*POINTS[:-1], "hook", "barrier", POINTS[-1])
KINDS = ("kill", "stop", "raise", "exit", "deadlock", "cut", "slow", "joiner", "rank 0", "two")
# A native deadlock that has let go of the GIL: the rank answers, and looks like those that wait.
NATIVE = {"gloo": ("norm", *BLOCKED), "paceline": ("norm", "bucket", "hook", "barrier")}
COORDINATOR = ("coordinator", "coordinator and rank")  # it knows nothing of backends
STUCK_AFTER_S = {"stop": 1.0, "deadlock": 3.0, "native wait": 3.0, "slow": 5.0}
EVERY = 2  # steps between two faults


def faults_for(kind: str, points: tuple[str, ...]) -> list[Fault]:
    """What fires, in its order. In recovery there is a fault only after a death.

    A joiner dies while it copies the state, after a death at each point; that of ``construction``
    while it runs the script alone, before it has come to its copy.
    """
    what = "kill" if kind in ("joiner", "rank 0", "two") else kind
    found: list[Fault] = []
    for number, point in enumerate(points):
        step = 0 if point == "construction" else EVERY * number + 1
        # In recovery the old connections have ended already: it is a new one that is cut.
        where = "copy" if (kind, point) == ("cut", "recovery") else point
        found.append((what, where, step, 0 if kind == "rank 0" else 1))
        if kind == "two":
            found.append((what, point, step, 2))
        if kind == "joiner" and point != "construction":
            found.append(("kill", "copy as joiner", 0, -1))
        if point == "recovery":
            found.append(("kill", "forward", step, {"two": 3, "rank 0": 1}.get(kind, 2)))
    if kind == "joiner":
        found.append(("kill", "forward", EVERY * len(points) + 1, 1))
        found.append(("kill", "construction as joiner", 0, -1))
    return found


def kill_the_coordinator(out: Path, faults: list[Fault]) -> Callable[[JobOnSharedServer], None]:
    """When a rank is at a point where that is planned: it waits there."""
    mine = [n for n, fault in enumerate(faults) if fault[0] in COORDINATOR]
    killed = {0}

    def on_wait(job: JobOnSharedServer) -> None:
        for number in mine:
            acted = out / f"acted-{number}"
            pid = job._keeper.pid if job._keeper is not None else 0
            is_due = (out / f"fired-{number}").exists() and not acted.exists()
            if is_due and pid not in killed:
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)
                acted.touch()

    return on_wait


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        *product([*KINDS, "native wait"], ["gloo", "paceline"]),
        *zip(COORDINATOR, ["gloo", "paceline"], strict=True),
    ],
)
def test_training_goes_on(tmp_path: Path, kind: str, backend: str) -> None:
    points = BLOCKED if kind in ("exit", "rank 0") else POINTS
    points = NATIVE[backend] if kind == "native wait" else points
    faults = faults_for(kind, points)
    steps = EVERY * len(points) + 4
    ranks = 4 if kind == "two" else 3  # one more has to hold the state
    ended = run_job(
        tmp_path,
        ranks=ranks,
        steps=steps,
        faults=faults,
        backend=backend,
        hold_s=100.0,
        stuck_after_s=STUCK_AFTER_S.get(kind, 0.0),
        options={"own_hook": True, **({"meet_s": 10.0} if kind == "native wait" else {})},
        on_wait=kill_the_coordinator(tmp_path / "out", faults),
    )
    check(ended, faults=len(faults), world=ranks, steps=steps)
    if kind == "cut":
        check_cuts(ended, backend, points)
    if kind == "slow":
        assert len(ended.events()) == 2, "only the death before the recovery changes something"


def check_cuts(ended: Ended, backend: str, points: tuple[str, ...]) -> None:
    """There was something to cut. Ranks that share memory are connected while they meet only."""
    found = sorted(ended.out.glob("cut-*"), key=lambda path: path.name.rsplit("-")[-1])
    cut = {point: int(path.read_text()) for point, path in zip(points, found, strict=True)}
    meetings = ("construction", "recovery")
    expected = {point for point in points if backend == "gloo" or point in meetings}
    assert {point for point, number in cut.items() if number} == expected, cut


@pytest.mark.parametrize(
    ("kills", "backend", "workers"),
    [
        (3, "gloo", 0),
        pytest.param(3, "gloo", 2, marks=pytest.mark.slow),
        pytest.param(20, "gloo", 0, marks=pytest.mark.slow),
        pytest.param(20, "paceline", 2, marks=pytest.mark.slow),
    ],
)
def test_with_hold_the_bits_are_those_of_an_undisturbed_run(
    tmp_path: Path, kills: int, backend: str, workers: int
) -> None:
    steps = 3 * kills + 10
    points = ["forward", "between", "bucket", "commit", "optimizer"]
    faults = [("kill", points[n % 5], 3 * n + 3, n % 3) for n in range(kills)]
    (tmp_path / "disturbed").mkdir()
    (tmp_path / "undisturbed").mkdir()
    same: dict[str, Any] = {
        "steps": steps, "hold_s": 100.0, "backend": backend, "options": {"workers": workers}
    }  # fmt: skip
    disturbed = run_job(tmp_path / "disturbed", faults=faults, **same)
    check(disturbed, faults=kills, world=3, steps=steps)
    undisturbed = run_job(tmp_path / "undisturbed", **same)
    check(undisturbed, faults=0, world=3, steps=steps)
    assert disturbed.results()[0]["digests"] == undisturbed.results()[0]["digests"]
