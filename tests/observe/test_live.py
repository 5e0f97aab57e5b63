"""The live table shows what ranks do, and names the one that the others wait for."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import subprocess
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from paceline.observe.live import LiveTable, _short, awaited_rank
from paceline.observe.records import Activity, Status
from paceline.observe.ring import EventWriter
from paceline.observe.ring_layout import MIN_BYTES
from paceline.observe.run_folder import RunFolder
from paceline.processes import host_name
from tests.observe.sample_records import INFO

DAY_NS = 24 * 3600 * 1_000_000_000
LONG_NS = 100_000_000_000


@pytest.fixture(autouse=True)
def clock_of_a_machine_that_has_run_for_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins at 0 when a machine boots, and what has lasted for long began after that."""
    own = time.perf_counter_ns
    monkeypatch.setattr(time, "perf_counter_ns", lambda: own() + DAY_NS)


def make_status(**changes: object) -> Status:
    now = time.perf_counter_ns()
    status = Status(Activity.WAITING, now, 42, now, 0.12345, 31_415.9, 0.3, 2, 3 << 30)
    return replace(status, **changes)


def write(folder: RunFolder, statuses: dict[int, Status], **info_changes: object) -> None:
    for rank, status in statuses.items():
        info = replace(INFO, rank=rank, **info_changes)
        with closing(EventWriter(folder.events(rank), info, MIN_BYTES)) as writer:
            writer.set_status(status)


def show(table: LiveTable, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(table.render())
    return console.file.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    slow = make_status(activity=Activity.BACKWARD, waiting_share=0.01)
    write(folder, {0: make_status(), 1: make_status(step=43), 2: slow})
    return folder


@pytest.mark.parametrize("width", [80, 200])
def test_a_row_for_each_rank(folder: RunFolder, width: int) -> None:
    lines = [line.split() for line in show(LiveTable(folder, range(4)), width).splitlines()]
    assert lines[0] == ["rank", "step", "samples/s", "loss", "waiting", "memory", "now"]
    assert lines[1] == ["0", "42", "31.4k", "0.1235", "30%", "3", "GiB", "waits"]
    assert lines[2][:2] == ["1", "43"]
    assert lines[3][-1] == "backward"
    assert lines[4] == ["3", "nothing", "yet"]
    assert " ".join(lines[5]) == "the others wait for rank 2, up to 30% of their time"


def test_more_ranks_than_a_terminal_has_lines(folder: RunFolder) -> None:
    """The line below the table, which says whom the others wait for, stays in sight."""
    table = LiveTable(folder, range(40))
    console = Console(file=io.StringIO(), width=80, force_terminal=False)
    console.print(table.render(10))
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 12
    assert lines[9].split()[0] == "8"
    assert lines[10].split() == ["31", "more", "ranks"]
    assert "wait for rank 2" in lines[11]


def test_one_line(folder: RunFolder) -> None:
    assert LiveTable(folder, range(4)).line() == (
        "step 42 to 43, 94.2k samples/s, loss 0.1235, waiting 30%, memory 9 GiB, 2 waits, "
        "1 backward, the others wait for rank 2, up to 30% of their time"
    )


def test_an_elastic_job(tmp_path: Path) -> None:
    """Ranks that joined have rows; spares and the dead are not waited for."""
    folder = RunFolder(tmp_path)
    late = make_status(activity=Activity.BACKWARD, waiting_share=0.01, last_rank=1)
    # rank 1 of the two that train has place 3
    write(folder, {0: make_status(last_rank=1), 1: make_status(), 2: make_status(step=0), 3: late})
    ours = {"0": INFO.pid, "3": INFO.pid}
    change = {"at_s": 1.0, "epoch": 1, "world": 2, "step": 7, "why": "rank 1 died"}
    change |= {"host": INFO.host, "pids": ours}
    folder.membership.write_text(json.dumps(change) + "\n")
    text = show(LiveTable(folder, range(2)), 120)
    rows = {line.split()[0]: line.rstrip() for line in text.splitlines()[1:5]}
    assert list(rows) == ["0", "1", "2", "3"]
    assert rows["0"].endswith("waits")
    assert "spare" in rows["2"] or "left" in rows["2"]
    assert "the others wait for rank 3, up to 30%" in text
    assert "epoch 1, 2 ranks: rank 1 died" in text.splitlines()[-1]
    line = LiveTable(folder, range(2)).line()
    assert line.startswith("step 42, 62.8k samples/s")


def test_before_anybody_has_begun(tmp_path: Path) -> None:
    table = LiveTable(RunFolder(tmp_path / "not yet"), range(2))
    assert table.line() == "no rank has begun to train"
    assert show(table).count("nothing yet") == 2
    assert "torch's DDP: --patch" in show(table)


def test_an_end_with_an_exception_fits_into_the_line(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    detail = "ValueError: no such layer (train.py:12, in step)\n" * 20
    write(folder, {0: make_status(activity=Activity.ENDED, detail=detail, loss=math.nan)})
    lines = show(LiveTable(folder, [0])).splitlines()
    assert "ended: ValueError" in lines[1]
    assert max(map(len, lines)) <= 80
    assert len([line for line in lines if line.strip()]) == 2


def test_who_does_one_thing_for_long_says_since_when(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    since_ns = time.perf_counter_ns() - 10 * LONG_NS
    write(folder, {0: make_status(activity=Activity.INPUT, since_ns=since_ns)}, host=host_name())
    assert "input 1" in show(LiveTable(folder, [0]))


class TestHeldUp:
    """Rank 2 was the last in most steps; now the others wait for rank 1."""

    def write(self, folder: RunFolder, activity: Activity, **info: object) -> LiveTable:
        long_ago_ns = time.perf_counter_ns() - LONG_NS
        waiting = make_status(since_ns=long_ago_ns + LONG_NS // 2)
        write(folder, {0: waiting, 2: waiting}, host=host_name())
        own = replace(INFO, **({"rank": 1, "host": host_name()} | info))
        with closing(EventWriter(folder.events(1), own, MIN_BYTES)) as writer:
            writer.set_status(make_status(activity=activity, since_ns=long_ago_ns))
        return LiveTable(folder, range(3))

    def test_the_rank_that_does_not_wait_now_is_named(self, tmp_path: Path) -> None:
        table = self.write(RunFolder(tmp_path), Activity.INPUT)
        caption = "the others wait for rank 1, between two steps for 1"
        assert f", 2 waits, 1 input, {caption}" in table.line()
        assert caption in show(table)

    def test_one_of_another_host(self, tmp_path: Path) -> None:
        """It counts time from another moment: how long it does something is not known here."""
        table = self.write(RunFolder(tmp_path), Activity.INPUT, host="another host")
        assert table.line().endswith("the others wait for rank 1, between two steps")
        row = show(table).splitlines()[2]
        assert row.split()[0] == "1"
        assert row.rstrip().endswith("input")

    def test_all_wait(self, tmp_path: Path) -> None:
        assert self.write(RunFolder(tmp_path), Activity.WAITING).line().endswith(", 3 waits")

    def test_one_that_has_ended_holds_up_nobody(self, tmp_path: Path) -> None:
        assert "wait for rank" not in self.write(RunFolder(tmp_path), Activity.ENDED).line()

    def test_a_stopped_process(self, tmp_path: Path) -> None:
        """Also if it has recorded that it waits."""
        with subprocess.Popen(["sleep", "600"]) as process:
            try:
                process.send_signal(signal.SIGSTOP)
                os.waitpid(process.pid, os.WUNTRACED)
                own = {"host": host_name(), "pid": process.pid}
                table = self.write(RunFolder(tmp_path), Activity.WAITING, **own)
                assert table.line().endswith("the others wait for rank 1, which is stopped")
            finally:
                process.kill()


@pytest.mark.parametrize(
    ("last", "shares", "awaited"),
    [
        ((1, 1, 1), (0.5, 0.0, 0.4), 1),
        ((1, 1, 1), (0.01, 0.0, 0.04), None),  # nobody waits
        ((0, 1, 2), (0.5, 0.5, 0.5), None),  # nobody agrees
        ((-1, -1, -1), (0.5, 0.5, 0.5), None),
        ((1, 1, 1), (0.0, 0.9, 0.0), None),  # it waits itself
        ((1, 1, 1), (0.8, 0.9, 0.01), None),  # it was last by accident; rank 2 waits least
    ],
)
def test_the_awaited_rank(
    last: tuple[int, ...], shares: tuple[float, ...], awaited: int | None
) -> None:
    pairs = enumerate(zip(last, shares, strict=True))
    statuses = {r: make_status(last_rank=named, waiting_share=s) for r, (named, s) in pairs}
    assert awaited_rank(statuses | {7: None}) == awaited


def test_units() -> None:
    assert [_short(n) for n in (0.5, 99.5, 980.4, 12_345, 4_560_000, 2e9)] == [
        "0.5", "99.5", "980", "12.3k", "4.56M", "2G",
    ]  # fmt: skip
