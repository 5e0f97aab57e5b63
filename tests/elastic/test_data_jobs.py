"""Elastic jobs whose data comes from workers, out of a stream, or in micro-batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.elastic.jobs import JobOnSharedServer, check, run_job


def living_workers(out: Path, member: int) -> list[str]:
    """Workers of a member's loaders that are still there."""
    pids = [path.name.rsplit("-", 1)[1] for path in out.glob(f"worker-{member}-*")]
    assert pids, "this member had no workers"
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize(
    "persistent", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["persistent", "new"]
)
def test_workers(tmp_path: Path, persistent: bool) -> None:
    """What they had prefetched is trained on once, and those of the killed rank end with it."""
    gone: list[bool] = []

    def look(job: JobOnSharedServer) -> None:
        path = job._folder.membership
        if path.exists() and len(path.read_text().splitlines()) > 1:  # it has been replaced
            gone.append(not living_workers(tmp_path / "out", 1))

    options = {"workers": 1, "persistent": persistent}
    faults = [("kill", "forward", 5, 1)]
    ended = run_job(
        tmp_path, ranks=2, faults=faults, hold_s=60.0, options=options, on_wait=look, pause_s=0.1
    )
    check(ended, faults=1, world=2)
    assert any(gone), "workers of the killed rank outlived its replacement's first step"


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream(tmp_path: Path, workers: int) -> None:
    options = {"iterable": True, "workers": workers, "world": 3}
    faults = [("kill", "bucket", 5, 1), ("kill", "commit", 9, 0)]
    ended = run_job(tmp_path, faults=faults, options=options, pause_s=0.1)
    check(ended, faults=2, world=3, steps=None)


@pytest.mark.slow
def test_fewer_ranks_accumulate(tmp_path: Path) -> None:
    """The global batch of 24 comes in pieces of 8: one for three ranks, two for two."""
    faults = [("kill", "forward", 5, 1), ("kill", "forward", 16, 0)]
    options = {"micro_batch": 8, "world": 3}  # it goes on until the replacement is there
    ended = run_job(tmp_path, faults=faults, options=options, pause_s=0.2)
    check(ended, faults=2, world=3, steps=None)
    assert 2 in [event["world"] for event in ended.events()]
