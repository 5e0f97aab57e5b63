"""Elastic jobs whose gradients are compressed: what a hook remembers goes back with a failed step.

What a rank has left out of its gradients is its own, and dies with it (docs/elastic.md): so all
ranks end with the same bits, but not with those of an undisturbed run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.elastic.jobs import check, run_job

POWER = {"start_powerSGD_iter": 2, "matrix_approximation_rank": 2}
KINDS: dict[str, dict[str, Any]] = {
    "int8": {"hook": "int8"},
    "powersgd": {"hook": "powersgd", "hook_options": POWER},
    "topk": {"hook": "topk", "hook_options": {"ratio": 0.1, "momentum": 0.5}},
    "allreduce": {"hook": "allreduce"},
}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "point", "hold_s"),
    [
        ("powersgd", "bucket", 60.0),
        pytest.param("int8", "bucket", 0.0, marks=SLOW),
        pytest.param("topk", "commit", 60.0, marks=SLOW),
        pytest.param("topk", "between", 0.0, marks=SLOW),
        pytest.param("powersgd", "forward", 0.0, marks=SLOW),
        pytest.param("int8", "optimizer", 60.0, marks=SLOW),
        pytest.param("allreduce", "bucket", 60.0, marks=SLOW),
    ],
)
def test_a_killed_rank(tmp_path: Path, kind: str, point: str, hold_s: float) -> None:
    faults = [("kill", point, 7, 1)]
    options = KINDS[kind] if hold_s else {**KINDS[kind], "world": 3}  # until it is replaced
    pause_s = 0.0 if hold_s else 0.2
    ended = run_job(tmp_path, faults=faults, hold_s=hold_s, options=options, pause_s=pause_s)
    check(ended, faults=1, world=3, steps=20 if hold_s else None)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["meeting", "forward"])
def test_local_sgd(tmp_path: Path, point: str) -> None:
    """A rank dies while the others wait for it in DiLoCo's meeting, or between two."""
    faults = [("kill", point, 8, 1)]
    ended = run_job(tmp_path, faults=faults, hold_s=60.0, options={"hook": "diloco"})
    check(ended, faults=1, world=3, differing=("optimizer",))
