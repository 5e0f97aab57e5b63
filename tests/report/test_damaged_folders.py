"""Files of a run folder are not trusted: report, doctor and verify end with words, or ignore them.

Folders come from other machines, are half written, or were edited; nobody's files may end in a
traceback, eat memory, or have a signal sent.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from paceline.cli import doctor, main
from paceline.errors import RecordsError
from paceline.observe import checksum_file
from paceline.observe.checksum_file import ChecksumWriter, RoundChecksums
from paceline.observe.jobs import running_jobs
from paceline.observe.records import Activity, RankHistory, Status
from paceline.observe.run_folder import RunFolder, RunInfo
from paceline.observe.stall.account import Account, WatchInfo, read_watch_info, write_json
from paceline.processes import catches_signal, process_space
from paceline.report.run import RunState, read_run
from tests.observe import sample_records as sample
from tests.report.histories import Job, simulate, write_folder, write_history

SOME = settings(
    max_examples=15,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
FEW = settings(SOME, max_examples=10)
DEEP = "[" * 100_000

hostile = st.one_of(
    st.integers(-(1 << 70), 1 << 70),
    st.floats(),
    st.text(max_size=20),
    st.just("\ud800\x1b[2J"),
    st.none(),
    st.booleans(),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=3),
)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_ANSWER_WAIT_S", 0.0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file of every kind."""
    path = write_folder(
        Job(ranks=2, steps=6), tmp_path_factory.mktemp("damaged") / "whole", 1 << 20
    )
    folder = RunFolder(path)
    for history in simulate(Job(ranks=2, steps=6)):
        rank = history.info.rank
        # No process: nobody is to be looked at, nor waited for.
        watch = WatchInfo(rank, "node", process_space(), 1 << 22, 1, 1 << 22, 60, "0x1")
        write_json(folder.watch(rank), watch)
        write_json(folder.account(rank), Account(rank, "t", 5, "in forward", collectives=("a",)))
        writer = ChecksumWriter(path, rank)
        for number in range(3):
            writer.write(RoundChecksums(number, {"w": "1"}, {rank: ("2", "3")}))
    change = {"at_s": 1.7e9, "epoch": 0, "world": 2, "step": 0, "pids": {"0": 1, "1": 2}}
    folder.membership.write_text(json.dumps(change) + "\n")
    folder.failure.write_text("rank 1 failed first: ValueError")
    folder.stall(1).write_text("Stall 1: rank 1\n")
    return path


def run_all(folder: Path) -> None:
    """Have all readers read it; they raise nothing, and say something."""
    for words in (["report"], ["doctor"], ["doctor", "--json"], ["verify", str(folder)]):
        out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # as a terminal: no surrogates
        err = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([*words, str(folder)])
        out.flush()
        assert code in (0, 1, 2), words
        assert err.getvalue() if code == 2 else out.buffer.tell() or err.getvalue(), words


FILES = (
    "run.json",
    "rank0.events",
    "rank0.watch",
    "rank0.account",
    "rank0.checksums",
    "membership.jsonl",
    "failure.txt",
)


def copied(whole: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    return folder


@SOME
@given(name=st.sampled_from(FILES), garbage=st.binary(max_size=300), at=st.integers(0, 5000))
@example("rank0.checksums", b"\xff\n", 0)
@example("rank0.account", DEEP.encode(), 0)
@example("rank0.checksums", DEEP.encode() + b"\n", 0)
@example("run.json", DEEP.encode(), 0)
@example("membership.jsonl", DEEP.encode(), 0)
def test_garbage(whole: Path, tmp_path: Path, name: str, garbage: bytes, at: int) -> None:
    folder = copied(whole, tmp_path)
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[:at] + garbage + data[at + len(garbage) :])
    run_all(folder)


@SOME
@given(name=st.sampled_from(("run.json", "rank0.watch", "rank0.account")), data=st.data())
def test_values_of_other_types_and_sizes(
    whole: Path, tmp_path: Path, name: str, data: st.DataObject
) -> None:
    folder = copied(whole, tmp_path)
    found: dict[str, Any] = json.loads((folder / name).read_text())
    for key in data.draw(st.lists(st.sampled_from(sorted(found)), min_size=1, max_size=3)):
        found[key] = data.draw(hostile)
    (folder / name).write_text(json.dumps(found))
    run_all(folder)


@FEW
@given(value=hostile, key=st.sampled_from(("at_s", "epoch", "world", "step", "pids", "why")))
def test_membership(whole: Path, tmp_path: Path, value: Any, key: str) -> None:
    folder = copied(whole, tmp_path)
    line = json.loads((folder / "membership.jsonl").read_text()) | {key: value}
    (folder / "membership.jsonl").write_text(json.dumps(line) + "\n")
    run_all(folder)


@FEW
@given(
    infos=st.lists(sample.infos, min_size=1, max_size=3, unique_by=lambda info: info.rank),
    status=sample.statuses,
    steps=st.lists(sample.steps, min_size=1, max_size=6),
    notes=st.lists(sample.notes, max_size=3),
    buckets=st.lists(sample.buckets, max_size=3),
)
def test_any_numbers_with_right_checksums(
    tmp_path: Path, infos: Any, status: Any, steps: Any, notes: Any, buckets: Any
) -> None:
    folder = tmp_path / "run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for info in infos:
        history = RankHistory(replace(info, buckets=tuple(buckets)), status, steps, tuple(notes))
        write_history(history, RunFolder(folder).events(info.rank), 1 << 20)
    run_all(folder)


@pytest.mark.parametrize(("later", "loss"), [(1 << 60, 1.0), (-(1 << 60), 1.0), (0, 1.7e308)])
def test_numbers_that_a_page_has_no_room_for(tmp_path: Path, later: int, loss: float) -> None:
    folder = RunFolder(tmp_path)
    for history in simulate(Job(ranks=2, steps=6)):
        steps = [replace(each, step=each.step + later, loss=loss) for each in history.steps]
        write_history(replace(history, steps=steps), folder.events(history.info.rank), 1 << 20)
    run_all(tmp_path)


@pytest.mark.parametrize("world", [-1, 10**18])
def test_a_world_that_cannot_be_costs_no_memory(tmp_path: Path, world: int) -> None:
    path = write_folder(Job(ranks=2, steps=6), tmp_path / "run", 1 << 20)
    info = RunFolder(path).read_info()
    assert info is not None
    RunFolder(path).write_info(replace(info, world=world))
    problems = read_run(path).problems
    assert len(problems) == (world > 2)
    assert all("2, 3, 4" in text and len(text) < 1000 for text in problems)


@pytest.mark.parametrize("pid", [0, -1, 10**15])
def test_a_pid_that_cannot_be_is_no_process(tmp_path: Path, pid: int) -> None:
    (history, _) = simulate(Job(ranks=2, steps=6))
    info = replace(history.info, host=os.uname().nodename, pid=pid)
    status = Status(Activity.BACKWARD, 1, 6, 1)
    path = RunFolder(tmp_path).events(0)
    write_history(replace(history, info=info, status=status), path, 1 << 20)
    assert read_run(tmp_path).state is RunState.STOPPED


@pytest.mark.parametrize("command", [5, "train.py", [1], None])
def test_a_command_that_is_none(tmp_path: Path, command: Any) -> None:
    fields = asdict(RunInfo("a", (), 1, 1, 1, 1.0, {})) | {"command": command}
    (tmp_path / "run.json").write_text(json.dumps(fields))
    assert RunFolder(tmp_path).read_info() is None


GOOD = WatchInfo(0, "node", "space", 17, 1, 17, signal.SIGRTMIN + 3, "0x1")


@pytest.mark.parametrize(
    "more",
    [
        {"signal": -1},
        {"signal": signal.SIGKILL},
        {"signal": signal.SIGRTMAX + 1},
        {"signal": 10**30},
        {"pid": 0},
        {"pid": -1},
        {"pid": 10**12},
        {"thread": -1},
    ],
    ids=str,
)
def test_no_such_signal_is_sent(tmp_path: Path, more: dict[str, int]) -> None:
    write_json(tmp_path / "watch", GOOD)
    assert read_watch_info(tmp_path / "watch") == GOOD
    write_json(tmp_path / "watch", replace(GOOD, **more))
    assert read_watch_info(tmp_path / "watch") is None


@pytest.mark.parametrize("number", [-1, 0, signal.SIGINT, signal.SIGRTMAX + 1])
def test_only_real_time_signals_count_as_caught(number: int) -> None:
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_DFL, "Python catches it"
    assert not catches_signal(os.getpid(), number)


def test_checksums_have_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum_file, "MAX_BYTES", 500)
    path = tmp_path / "rank0.checksums"
    path.write_text('{"round": 1, "tensors": {}, "shards": {}}\n' * 20)
    assert len(checksum_file.read_file(path)) == 1
    path.write_text(path.read_text() * 2)
    with pytest.raises(RecordsError, match="has more than 1000 bytes"):
        checksum_file.read_file(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RecordsError, match="not a regular file"):
        checksum_file.read_file(path)


@pytest.mark.parametrize("text", [DEEP, '{"pid": 1e999}', '{"pid": 1}', "\x00", "[]"])
def test_entries_of_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert running_jobs() == []
    (tmp_path / "paceline" / "jobs" / "1.json").write_text(text)
    assert running_jobs() == []
