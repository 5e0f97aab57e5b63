"""``paceline report`` as a user calls it: files, errors, words."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.cli.report import EXAMPLE
from paceline.observe.records import Activity, Status
from paceline.observe.run_folder import RunFolder, RunInfo
from paceline.observe.stall.account import WatchInfo, write_json
from paceline.observe.stall.views import look_at_files
from paceline.processes import host_name, process_space, start_ticks
from paceline.report.phases import Phase
from paceline.report.run import RunState, read_run
from tests.report.histories import Delay, Job, simulate, write_folder, write_history

SLOW = Job(steps=20, delays=(Delay(2, Phase.BACKWARD, 100.0, run_delay=1.0),))


def report(*words: object) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(["report", *map(str, words)])
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue(), err.getvalue()


@pytest.fixture
def slow_run(tmp_path: Path) -> Path:
    return write_folder(SLOW, tmp_path / "slow")


def test_writes_a_page_and_says_what_matters(slow_run: Path) -> None:
    code, out, _ = report(slow_run)
    assert code == 0
    assert "Rank 2 costs the others" in out
    assert "in backward" in out
    page = slow_run / "report.html"
    assert "Rank 2" in page.read_text()
    assert page.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in slow_run.iterdir() if path.name.startswith(".")) == []


def test_json_alone_on_stdout(slow_run: Path) -> None:
    code, out, err = report(slow_run, "--json", "-")
    assert code == 0
    assert json.loads(out)["suspects"][0]["straggler"]["rank"] == 2
    assert "Rank 2 costs the others" in err


def test_all_outputs(slow_run: Path, tmp_path: Path) -> None:
    words = ["-o", tmp_path / "p.html", "--json", tmp_path / "n.json", "--trace", tmp_path / "t"]
    code, _, _ = report(slow_run, *words, "--flight-recorder", tmp_path / "fr")
    assert code == 0
    assert not (slow_run / "report.html").exists()
    assert json.loads((tmp_path / "n.json").read_text())["steps"] == 19
    assert json.loads((tmp_path / "t").read_text())["traceEvents"]
    assert len(list((tmp_path / "fr").iterdir())) == 4
    assert (tmp_path / "p.html").exists()


def test_compares_two(slow_run: Path, tmp_path: Path) -> None:
    other = write_folder(Job(steps=20), tmp_path / "usual")
    code, out, _ = report(other, slow_run, "--json", tmp_path / "c.json")
    assert code == 0
    assert "slower" in out
    assert (slow_run / "compare.html").exists()
    assert json.loads((tmp_path / "c.json").read_text())["changes"][0]["verdict"] == "slower"
    code, _, err = report(other, slow_run, "--trace", tmp_path / "t")
    assert code == 2
    assert "for one run" in err


def test_examples_in_the_help_work(
    slow_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "paceline-runs").mkdir()
    for name in ("RUN", "BEFORE", "AFTER", "paceline-runs/newest"):
        write_folder(SLOW, tmp_path / name)
    monkeypatch.setattr("webbrowser.open", lambda address: True)
    lines = re.findall(r"^  (paceline report.*?)(?:\s{2,}.*)?$", EXAMPLE, re.MULTILINE)
    assert len(lines) == 5
    for line in lines:
        code, _, err = report(*shlex.split(line)[2:])
        assert code == 0, (line, err)
    assert (tmp_path / "paceline-runs" / "newest" / "report.html").exists()
    code, out, _ = report("--help")
    assert code == 0
    assert "paceline report BEFORE AFTER" in out


class TestErrors:
    def test_no_such_folder(self, tmp_path: Path) -> None:
        code, _, err = report(tmp_path / "nowhere")
        assert (code, "there is no run folder" in err) == (2, True)

    def test_the_newest_is_suggested(self, slow_run: Path, tmp_path: Path) -> None:
        assert f"the newest run there is {slow_run}" in report(tmp_path / "nowhere")[2]
        assert f"the newest run there is {slow_run}" in report(tmp_path)[2]

    def test_no_run_folder(self, tmp_path: Path) -> None:
        code, _, err = report(tmp_path)
        assert code == 2
        assert "is not a run folder: it holds no rank*.events" in err
        RunFolder(tmp_path).write_info(RunInfo("a", ("train.py",), 2, 1, 1, 1.0, {}))
        assert "a script with torch's DDP needs `paceline run --patch`" in report(tmp_path)[2]
        (tmp_path / "file").write_text("")
        assert "is a file" in report(tmp_path / "file")[2]

    def test_no_run_at_all(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert "there is no run in paceline-runs: name a folder" in report()[2]

    def test_no_step_yet(self, tmp_path: Path) -> None:
        code, _, err = report(write_folder(Job(steps=0), tmp_path / "empty"))
        assert code == 2
        assert "has not finished a step yet" in err

    def test_a_folder_that_a_larger_job_has_used_before(self, slow_run: Path) -> None:
        """As PACELINE_RUN_DIR may name it; ``paceline run`` refuses it."""
        (slow_run / "run.json").unlink()
        for history in simulate(Job(ranks=2, steps=20)):
            write_history(history, RunFolder(slow_run).events(history.info.rank))
        found = read_run(slow_run)
        assert [history.info.rank for history in found.histories] == [0, 1]
        assert found.problems == ("Records of an earlier job with more ranks (2, 3) are left out.",)
        assert [view.rank for view in look_at_files(RunFolder(slow_run))] == [0, 1]

    def test_one_step(self, tmp_path: Path) -> None:
        code, out, _ = report(write_folder(Job(steps=1), tmp_path / "one"))
        assert code == 0
        assert "Too few steps" in out

    def test_a_place_that_is_not_there(self, slow_run: Path, tmp_path: Path) -> None:
        code, _, err = report(slow_run, "-o", tmp_path / "none" / "p.html")
        assert code == 2
        assert "cannot be written: No such file or directory" in err

    def test_three_runs(self, slow_run: Path) -> None:
        assert "one run or two, not 3" in report(slow_run, slow_run, slow_run)[2]

    def test_damaged_files_cost_their_rank(self, slow_run: Path) -> None:
        (slow_run / "rank1.events").write_bytes(b"nonsense" * 100)
        (slow_run / "rank3.events").unlink()
        code, out, _ = report(slow_run)
        assert code == 0
        assert "rank1.events cannot be read" in out
        assert "Of 4 ranks, 1, 3 left no readable records" in out
        assert "Rank 2 costs the others" in out
        assert "rank1.events cannot be read" in (slow_run / "report.html").read_text()

    def test_all_files_damaged(self, slow_run: Path) -> None:
        for rank in range(4):
            (slow_run / f"rank{rank}.events").write_bytes(b"")
        code, _, err = report(slow_run)
        assert code == 2
        assert "no file of records in" in err


class TestState:
    def write(self, path: Path, status: Status, pid: int) -> Path:
        write_folder(SLOW, path)
        for history in simulate(SLOW):
            info = replace(history.info, host=host_name(), pid=pid)
            write_history(
                replace(history, info=info, status=status),
                RunFolder(path).events(history.info.rank),
            )
        return path

    def test_still_going(self, tmp_path: Path) -> None:
        status = Status(Activity.BACKWARD, 1, 20, 1)
        path = self.write(tmp_path / "r", status, os.getpid())
        assert read_run(path).state is RunState.RUNNING
        assert "The run is still going" in report(path)[1]

    def test_killed(self, tmp_path: Path) -> None:
        status = Status(Activity.BACKWARD, 1, 20, 1)
        path = self.write(tmp_path / "r", status, 2**22 + 1)  # no such process
        assert read_run(path).state is RunState.STOPPED
        assert "did not say why" in report(path)[1]

    def test_killed_and_another_process_has_its_pid(self, tmp_path: Path) -> None:
        status = Status(Activity.BACKWARD, 1, 20, 1)
        path = self.write(tmp_path / "r", status, os.getpid())
        pid, began = os.getpid(), start_ticks(os.getpid())
        for rank in range(4):
            watch = WatchInfo(rank, host_name(), process_space(), pid, began - 1, pid, 0, "")
            write_json(RunFolder(path).watch(rank), watch)
        assert read_run(path).state is RunState.STOPPED
        write_json(RunFolder(path).watch(0), replace(watch, rank=0, started=began))
        assert read_run(path).state is RunState.RUNNING

    def test_failed(self, tmp_path: Path) -> None:
        status = Status(Activity.ENDED, 1, 20, 1, detail="ValueError: no")
        path = self.write(tmp_path / "r", status, 1)
        RunFolder(path).failure.write_text("rank 1 failed first: ValueError: no")
        assert read_run(path).state is RunState.FAILED
        assert "rank 1 failed first" in report(path)[1]

    def test_finished(self, slow_run: Path) -> None:
        assert read_run(slow_run).state is RunState.FINISHED


def test_a_ring_that_lost_its_oldest_steps(tmp_path: Path) -> None:
    """Ranks need not have lost the same steps."""
    job = Job(steps=4000, delays=SLOW.delays)
    path = write_folder(job, tmp_path / "long", file_bytes=1 << 20)
    code, out, _ = report(path)
    assert code == 0
    assert "Records keep the newest steps only" in out
    assert "Rank 2 costs the others" in out
