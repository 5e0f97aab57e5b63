"""Ranks die, join and leave, and the training ends with the bits of an undisturbed one."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from paceline.cli.scale import ask
from paceline.observe.run_folder import RunFolder
from paceline.report.verify import compare_runs
from paceline.testing import run_ranks
from tests.elastic import jobs
from tests.shards import alone
from tests.shards.one_rank import IS_LONG, LONG_NAMES

STEPS = 24
Fault = tuple[str, int, int]
"""At which point, from which step on, which rank is killed."""


@functools.cache
def undisturbed(steps: int, name: str) -> str:
    """The digest of a training on one rank, without any of this."""
    return run_ranks(1, alone.train_named, name, steps, timeout_s=600)[0]


@pytest.fixture(autouse=True)
def _script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "SCRIPT", Path(__file__).parent / "elastic_script.py")


def check(
    ended: jobs.Ended, *, faults: int, steps: int = STEPS, name: str = "cnn with dropout"
) -> None:
    assert ended.code == 0, ended.logs()
    assert ended.fired() == faults, ended.logs()
    assert {each["digest"] for each in ended.results()} == {undisturbed(steps, name)}, ended.logs()
    rounds = steps * alone.ELASTIC[name].accumulate
    assert {each["round"] for each in ended.results()} == {rounds}


@pytest.mark.parametrize(
    ("name", "faults"),
    [
        ("cnn with dropout", [("shard", 4, 1), ("between", 12, 0)]),
        pytest.param("synced", [("last shard", 4, 2), ("shard", 9, 0)], marks=pytest.mark.slow),
    ],
)
def test_killed_ranks(tmp_path: Path, name: str, faults: Sequence[Fault]) -> None:
    """The survivors go on with fewer ranks, then with a replacement."""
    options = {"faults": faults, "case": name}
    ended = jobs.run_job(tmp_path, steps=STEPS, options=options, pause_s=0.1)
    check(ended, faults=len(faults), name=name)
    assert len(ended.events()) > 1
    alike = RunFolder.create("alone.py", tmp_path / "alone").path
    run_ranks(1, alone.train_recorded, name, STEPS, str(alike))
    found = compare_runs(alike, ended.folder.path)
    rounds = STEPS * alone.ELASTIC[name].accumulate
    text = f"equal: {rounds} steps, 0 to {rounds - 1}, and what the last one has made"
    assert (found.is_equal, found.text) == (True, text)


@pytest.mark.slow
def test_a_difference_in_a_job_with_kills_is_named(tmp_path: Path) -> None:
    """Rank 0, which writes the parameters, is killed; and one update of the job is another."""
    options = {"faults": [("shard", 4, 0), ("between", 12, 1)], "case": "cnn", "changes": 15}
    ended = jobs.run_job(tmp_path, steps=STEPS, options=options, pause_s=0.1)
    assert (ended.code, ended.fired()) == (0, 2), ended.logs()
    alike = RunFolder.create("alone.py", tmp_path / "alone").path
    run_ranks(1, alone.train_recorded, "cnn", STEPS, str(alike))
    found = compare_runs(alike, ended.folder.path)
    assert (found.is_equal, found.round, found.shard) == (False, 16, None), found.text
    assert "differ at the start of step 16: step 15, or its update" in found.text


def scaler(first: int, targets: list[int]) -> Callable[[jobs.JobOnSharedServer], None]:
    """Ask for other numbers of ranks, one after the other, as soon as the last is there."""
    wanted = [first]

    def scale(job: jobs.JobOnSharedServer) -> None:
        if targets and job.worlds()[-1:] == wanted[-1:]:
            wanted.append(targets.pop(0))
            # In a thread: the launcher's own has to pass the question on.
            threading.Thread(target=ask, args=(job._folder, wanted[-1]), daemon=True).start()

    return scale


@pytest.mark.slow
def test_resizes(tmp_path: Path) -> None:
    ended = jobs.run_job(tmp_path, ranks=2, steps=40, pause_s=0.3, on_wait=scaler(2, [4, 3]),
                         hurries=lambda worlds: worlds[-2:] == [4, 3])  # fmt: skip
    check(ended, faults=0, steps=40)
    worlds = [event["world"] for event in ended.events()]
    assert worlds[0] == 2, worlds
    assert worlds[-2:] == [4, 3], worlds  # perhaps 3 in between: those that join need not meet


LONG_JOBS = [(name, 2, [4, 3], "auto") for name in LONG_NAMES]
if IS_LONG:  # more ranks, and one alone; over gloo
    LONG_JOBS += [(name, 4, [8, 1], "auto") for name in LONG_NAMES]
    LONG_JOBS += [(name, 3, [1, 4], "c10d") for name in LONG_NAMES]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "first", "targets", "transport"), LONG_JOBS)
def test_a_thousand_steps(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    first: int,
    targets: list[int],
    transport: str,
) -> None:
    """Killed twice, with replacements, and resized twice meanwhile."""
    monkeypatch.setattr(jobs, "DEADLINE_S", 800.0)
    faults = [("shard", 300, 1), ("between", 600, 0)] if min(targets) > 1 else [("shard", 9, 1)]
    ended = jobs.run_job(
        tmp_path,
        ranks=first,
        steps=1000,
        options={"faults": faults, "case": name, "transport": transport},
        on_wait=scaler(first, list(targets)),
    )
    check(ended, faults=len(faults), steps=1000, name=name)
    worlds = [event["world"] for event in ended.events()]
    assert {first, *targets} <= set(worlds), worlds
    assert worlds[-1] == targets[-1]
