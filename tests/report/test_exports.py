"""What other programs read: JSON, traces, dumps for torchfrtrace, comparisons."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.report.analysis import analyse
from paceline.report.compare import ChangeVerdict, compare, headline, judge
from paceline.report.flight import write_dumps
from paceline.report.phases import Phase
from paceline.report.trace import write_trace
from tests.report.histories import Delay, Job, make_run

SLOW = Job(steps=12, delays=(Delay(2, Phase.BACKWARD, 50.0),))


def test_json_has_no_nan_and_all_numbers() -> None:
    run = make_run(SLOW)
    silent = tuple(
        replace(
            history, steps=tuple(replace(record, loss=float("nan")) for record in history.steps)
        )
        for history in run.histories
    )
    found = analyse(replace(run, histories=silent)).analysis.to_dict()
    again = json.loads(json.dumps(found, allow_nan=False))
    assert again["last_loss"] is None
    assert again["suspects"][0]["straggler"]["rank"] == 2
    assert again["suspects"][0]["straggler"]["phase"] == "backward"
    assert again["ranks"][2]["own"]["backward"] == pytest.approx(90.0)


def trace_of(job: Job) -> list[dict[str, object]]:
    measured = analyse(make_run(job))
    file = io.StringIO()
    write_trace(file, measured.analysis, measured.steps)
    found: list[dict[str, object]] = json.loads(file.getvalue())["traceEvents"]
    return found


def test_trace_has_every_phase_and_bucket_of_every_step() -> None:
    events = trace_of(SLOW)
    slices = [event for event in events if event["ph"] == "X"]
    backward = [each for each in slices if each["name"] == "backward" and each["pid"] == 2]
    assert [each["dur"] for each in backward] == [90_000.0] * 11
    waiting = [each for each in slices if each["name"] == "waiting for ranks" and each["pid"] == 0]
    assert [each["dur"] for each in waiting] == [50_000.0] * 11
    reducing = [each for each in slices if each["name"] == "reducing"]
    assert len(reducing) == 11 * 4 * 4  # steps, ranks, buckets
    assert all(each["dur"] >= 0 and each["ts"] >= 0 for each in slices)  # type: ignore[operator]
    named = {each["pid"] for each in events if each["name"] == "process_name"}
    assert named == {0, 1, 2, 3}


def test_tracks_of_a_trace_are_of_one_rank() -> None:
    """Perfetto knows a track by its number, and takes one that is a rank's for its main thread."""
    owners: dict[object, set[object]] = {}
    for event in trace_of(SLOW):
        if "tid" in event:
            owners.setdefault(event["tid"], set()).add(event["pid"])
    assert all(len(ranks) == 1 for ranks in owners.values())
    assert not owners.keys() & {rank for ranks in owners.values() for rank in ranks}


def test_arrows_lead_from_the_last_rank_to_the_others() -> None:
    events = trace_of(SLOW)
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert begins.keys() == ends.keys()
    assert len(begins) == 11 * 4 * 3
    assert {event["pid"] for event in begins.values()} == {2}
    assert {event["pid"] for event in ends.values()} == {0, 1, 3}
    for number, begin in begins.items():
        assert begin["ts"] <= ends[number]["ts"]  # type: ignore[operator]


def frtrace(folder: Path) -> str:
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace"]
    told = subprocess.run(
        [*command, str(folder), "--prefix", "rank_"], capture_output=True, text=True, timeout=120
    )
    assert told.returncode == 0, told.stderr
    return told.stdout + told.stderr


def test_torchfrtrace_reads_it_and_names_the_rank_that_left(tmp_path: Path) -> None:
    run = make_run(Job(steps=6, ranks=3))
    write_dumps(tmp_path / "whole", run.histories)
    assert "missing ranks" not in frtrace(tmp_path / "whole")
    left = replace(run.histories[1], steps=run.histories[1].steps[:4])
    write_dumps(tmp_path / "left", (run.histories[0], left, run.histories[2]))
    text = frtrace(tmp_path / "left")
    assert "gloo:all_reduce" in text
    assert "missing ranks: {1}" in text
    assert (tmp_path / "left" / "rank_1").stat().st_mode & 0o777 == 0o600


def test_dumps_are_private_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the umask, and whoever may read what was there before."""
    modes: list[int] = []
    dump = pickle.dump

    def spy(value: object, file: Any) -> None:
        modes.append(os.fstat(file.fileno()).st_mode & 0o777)
        dump(value, file)

    monkeypatch.setattr(pickle, "dump", spy)
    (tmp_path / "rank_0").write_text("")
    (tmp_path / "rank_0").chmod(0o666)
    with (tmp_path / "rank_0").open() as before:
        old = os.umask(0)
        try:
            write_dumps(tmp_path, make_run(Job(steps=6, ranks=2)).histories)
        finally:
            os.umask(old)
        assert before.read() == "", "who had it open sees nothing"
    assert modes == [0o600] * 2
    assert [(tmp_path / f"rank_{n}").stat().st_mode & 0o777 for n in (0, 1)] == [0o600] * 2


def test_a_slower_phase_is_found_and_the_rest_is_noise() -> None:
    before = analyse(make_run(Job(steps=300, jitter=0.1, seed=1), "before"))
    usual = {**Job().usual_ms, Phase.FORWARD: 24.0}
    after = analyse(make_run(Job(steps=300, jitter=0.1, seed=2, usual_ms=usual), "after"))
    found = {change.name: change for change in compare(before, after).changes}
    assert found["forward"].verdict is ChangeVerdict.SLOWER
    assert found["forward"].low_ms < 4.0 < found["forward"].high_ms + 0.5
    assert found["step"].verdict is ChangeVerdict.SLOWER
    assert found["optimizer"].verdict is ChangeVerdict.SAME
    assert found["reduction of bucket 1"].verdict is ChangeVerdict.SAME
    assert headline(compare(before, after)).endswith(" more time, most of it in forward.")
    assert "less time, most of it in forward" in headline(compare(after, before))
    assert "within the noise" in headline(compare(before, before))


def test_false_alarms_are_rare() -> None:
    """Steps that are not independent: the speed wanders. 5 % may be wrong, not more than 15 %."""
    chance = random.Random(3)

    def series() -> list[float]:
        drift, found = 0.0, []
        for _ in range(300):
            drift = 0.8 * drift + chance.gauss(0, 1)
            found.append(100 + drift)
        return found

    wrong = sum(
        judge("step", series(), series()).verdict is not ChangeVerdict.SAME for _ in range(40)
    )
    assert wrong <= 6


def test_too_few_steps() -> None:
    few = analyse(make_run(Job(steps=6)))
    assert compare(few, few).changes[0].verdict is ChangeVerdict.UNSURE
    assert headline(compare(few, few)) == "Too few steps to tell the runs apart."
