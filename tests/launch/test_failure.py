"""Culprit and victims; logs that cannot be written; signals in order; the list of jobs."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import ConfigurationError
from paceline.launch import memory_events, shutdown
from paceline.launch.failure import RankEnd, find_failure
from paceline.launch.local_ranks import crash_place
from paceline.launch.output import LogFile, RankStream
from paceline.launch.screen import Screen
from paceline.launch.script import Raised
from paceline.observe import jobs

FINE = RankEnd(0, 100, 0, 50, False, None, "rank0.log")


def end(rank: int, code: int | None = 1, at: int = 10, **more: object) -> RankEnd:
    log = f"rank{rank}.log"
    return replace(FINE, rank=rank, pid=100 + rank, exit_code=code, ended_ns=at, log=log, **more)


def raised(text: str, at: int, pid: int = 0, rank: int = -1) -> Raised:
    return Raised(text, pid, rank, at)


CASES = {
    "the first in time": ([end(0, at=20), end(1, at=10)], 1),
    "raised first, ended last": (
        [end(0, at=20), end(1, at=90, raised=raised("ValueError: x", 10))],
        1,
    ),
    "a lost connection is a consequence": (
        [end(0, at=5, raised=raised("RuntimeError: Connection closed by peer", 4)), end(1, -9, 6)],
        1,
    ),
    "a chain of lost ranks": (
        [
            end(0, raised=raised("PeerLostError: rank 1", 5, pid=101)),
            end(1, raised=raised("PeerLostError: rank 2", 6, pid=102)),
            end(2, -9, 99),
        ],
        2,
    ),
    "who ended too early": ([end(0, raised=raised("PeerLostError", 5, pid=101)), end(1, 0, 1)], 1),
    "who is stopped": (
        [
            end(0, raised=raised("CollectiveTimeoutError", 5, rank=1)),
            end(1, -9, 90, was_stopped=True),
        ],
        1,
    ),
    "blame in a circle ends": (
        [
            end(0, raised=raised("PeerLostError", 5, pid=101)),
            end(1, raised=raised("PeerLostError", 6, pid=100)),
        ],
        1,
    ),
    "ended by us is no failure": ([end(0, -15, 5, was_stopped=True), end(1, 3, 9)], 1),
}


@pytest.mark.parametrize("name", CASES)
def test_the_culprit(name: str) -> None:
    ends, rank = CASES[name]
    failure = find_failure(ends)
    assert failure is not None
    assert failure.culprit.rank == rank
    assert failure.exit_status > 0


def test_the_block() -> None:
    assert find_failure([FINE, end(1, -15, was_stopped=True)]) is None
    victims = [end(r, raised=raised("PeerLostError: y", 30, pid=101)) for r in (0, 2)]
    stopped = end(3, -15, 99, was_stopped=True)
    seen = "in forward, in step 2"
    culprit = end(1, -9, 20, note="memory ran out", tail=["step 1", "step 2"], last_seen=seen)
    failure = find_failure([victims[0], culprit, victims[1], stopped])
    assert failure is not None
    assert failure.exit_status == 128 + 9
    assert failure.block() == (
        "paceline run: rank 1 (pid 101) failed first: killed by SIGKILL: memory ran out\n"
        "  it was last seen in forward, in step 2\n"
        "  the last lines that it wrote (rank1.log):\n"
        "    | step 1\n"
        "    | step 2\n"
        "  because of that: ranks 0, 2 raised PeerLostError; rank 3 stopped by the launcher; "
        "their logs are rank0.log, rank2.log, rank3.log\n"
    )


def test_the_block_has_the_traceback_once() -> None:
    trace = "Traceback (most recent call last):\n  File x\nValueError: a\nb\n"
    culprit = end(1, raised=replace(raised("ValueError: a\nb (x.py:1)", 5), traceback=trace))
    victims = [end(rank, at=30) for rank in range(2, 12)]
    failure = find_failure([culprit, *victims])
    assert failure is not None
    assert failure.block() == (
        "paceline run: rank 1 (pid 101) failed first: ValueError: a\n"
        "  Traceback (most recent call last):\n"
        "    File x\n"
        "  ValueError: a\n"
        "  b\n"
        "  it wrote nothing (rank1.log)\n"
        "  because of that: 10 ranks exited with code 1; their logs are in .\n"
    )


def test_what_garbles_a_terminal_is_left_out_of_the_block() -> None:
    """Colours that nobody ends, binary output, lines without an end."""
    tail = ("\x1b[31mred", "a\x00b\x0e", "x" * 1000)
    failure = find_failure([replace(end(0), tail=tail)])
    assert failure is not None
    shown = [line for line in failure.block().splitlines() if line.startswith("    | ")]
    assert shown[:2] == ["    | red", "    | a b"]
    assert shown[2].endswith("x ... (600 more characters)")


CRASH = """before
Fatal Python error: Segmentation fault

Current thread 0x00007f54a12f2740 (most recent call first):
  File "/x/site-packages/torch/nn/functional.py", line 9 in linear
  File "train.py", line 41 in forward
  File "train.py", line 80 in main

Extension modules: numpy.core._multiarray_umath (total: 1)"""


def test_the_place_of_a_crash() -> None:
    assert crash_place(CRASH.splitlines()) == "at train.py:41, in forward"
    assert crash_place(["Fatal Python error: Aborted", "", "<no Python frame>"]) == ""
    assert crash_place(['  File "x.py", line 3 in f']) == ""
    assert crash_place([]) == ""


def test_the_same_on_all_ranks() -> None:
    ends = [end(rank, raised=raised("FileNotFoundError: x", rank)) for rank in range(3)]
    failure = find_failure(ends)
    assert failure is not None
    last = "  because of that: ranks 1, 2 raised FileNotFoundError, too; their logs are "
    assert failure.block().splitlines()[-1] == last + "rank1.log, rank2.log"


def test_a_long_traceback_is_cut_in_its_middle() -> None:
    trace = "\n".join(f"line {number}" for number in range(100))
    failure = find_failure([end(0, raised=replace(raised("ValueError", 5), traceback=trace))])
    assert failure is not None
    lines = failure.block().splitlines()
    assert lines[1] == "  line 0"
    assert lines[20:23] == [
        "  line 19",
        "    ... 40 lines, all of them in its log ...",
        "  line 60",
    ]
    assert lines[-2:] == ["  line 99", "  it wrote nothing (rank0.log)"]


def test_memory_events(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    assert memory_events.oom_kills(own, tmp_path) is None
    own.write_text("1:name=x:/\n0::/a/b\n")
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "memory.events").write_text("low 0\noom 4\noom_kill 3\n")
    assert memory_events.oom_kills(own, tmp_path) == 3


def test_a_full_disk_costs_lines_only() -> None:
    warnings: list[str] = []
    log = LogFile(Path("/dev/full"), warnings.append)
    assert log.tail(2) == []
    for number in range(3):
        log.write(b"line %d\n" % number)
    log.write_traceback("Traceback\n")
    assert log.tail(2) == ["line 1", "line 2"]
    log.close()
    (warning,) = warnings
    assert "/dev/full is incomplete: No space left on device" in warning


def test_lines_get_a_number(tmp_path: Path) -> None:
    shown: list[tuple[int, bytes]] = []
    log = LogFile(tmp_path / "log", pytest.fail)
    plain = RankStream(1, log, lambda n, data: shown.append((n, data)), b"")
    other = RankStream(2, log, lambda n, data: shown.append((n, data)), b"[3] ")
    for stream in (plain, other):
        os.write(stream.writer, b"a\nb 10%\rb 90%")
        assert stream.pump()
        assert stream.pump()  # nothing there, and does not wait
        stream.read_rest()
        stream.close_writer()
        assert not stream.pump()
        stream.close()
    log.close()
    assert shown == [(1, b"a\nb 10%\rb 90%"), (2, b"[3] a\n"), (2, b"[3] b 90%\n")]
    assert (tmp_path / "log").read_bytes() == b"a\nb 10%\rb 90%" * 2
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_lines_are_not_put_into_lines(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    with Screen() as screen:
        screen.show(1, b"out")
        screen.show_lines(1, b"[1] a\n")
        assert screen.until_next_s() is not None
        screen.show(1, b" 0\n")
        assert screen.until_next_s() is None
        assert capfdbinary.readouterr().out == b"out 0\n[1] a\n"
        screen.show(1, b"10 %")
        screen.show_lines(1, b"[1] b\n")
    assert capfdbinary.readouterr().out == b"10 %\n[1] b\n", "a line that has no end ends"


def test_the_order_of_signals() -> None:
    ending = shutdown.Shutdown()
    assert ending.until_next_s() is None
    ending.begin(shutdown.on_interrupt(600))
    assert [timed.number for timed in ending.take_due()] == [signal.SIGINT]
    assert ending.has_begun
    ending.begin(shutdown.on_failure(600, 600))  # later than what is planned
    assert ending.take_due() == []
    ending.begin(shutdown.AT_ONCE)
    assert [timed.number for timed in ending.take_due()] == [signal.SIGKILL]


def test_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert jobs.running_jobs() == []
    directory = jobs.registry()
    assert directory.stat().st_mode & 0o777 == 0o700
    (directory / "1.json").write_text('{"pid": 1, "start_time": 3, "folder": "", "command": []}')
    (directory / "2.json").write_text("{")
    with jobs.listed_job(tmp_path / "run", ["train.py"]) as job:
        assert jobs.running_jobs() == [job]
        assert job.folder == str(tmp_path / "run")
        assert [path.name for path in directory.iterdir()] == [f"{os.getpid()}.json"]
    assert list(directory.iterdir()) == []
    directory.rmdir()
    directory.symlink_to(tmp_path)
    with pytest.raises(ConfigurationError, match="not a directory of this user"):
        jobs.registry()
    with jobs.listed_job(tmp_path / "run", ["train.py"]):
        pass  # training goes on
