"""What the launcher shows: whatever the table or the terminal does, training goes on."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import pytest

from paceline.launch import screen
from paceline.launch.screen import Screen


class Table:
    """Breaks at the second look."""

    def __init__(self) -> None:
        self.looks = 0

    def look(self) -> None:
        self.looks += 1
        if self.looks > 1:
            raise ZeroDivisionError("of the table\nin two lines")

    def statuses(self) -> dict[int, object]:
        return {0: self.look() or "a status"}

    def line(self) -> str:
        return f"look {self.looks}"

    def render(self, rows: int) -> str:
        assert rows > 0
        self.look()
        return f"look {self.looks}"


DROPPED = "paceline run: no table any more (ZeroDivisionError: of the table); training goes on\n"


def make_due(shown: Screen) -> Callable[[], None]:
    def tick() -> None:
        shown._next_s = 0.0
        shown.tick()

    return tick


def pretend_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stdout and stderr say that they are one; they are files of ``capfd``."""
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)


def test_a_line_that_fails(capfd: pytest.CaptureFixture[str]) -> None:
    with Screen(Table()) as shown:
        tick = make_due(shown)
        for _ in range(4):
            tick()
        shown.show(1, b"printed\n")
        assert shown.until_next_s() is None
    assert capfd.readouterr() == ("printed\n", f"look 1\n{DROPPED}")


def test_a_table_that_fails(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What stood above it comes once; what rank 0 has begun to write is not lost."""
    pretend_terminal(monkeypatch)
    streams = sys.stdout, sys.stderr
    with Screen(Table()) as shown:
        tick = make_due(shown)
        assert shown._live is not None
        shown.show(1, b"above\nbegun")
        for _ in range(3):
            tick()
        assert (sys.stdout, sys.stderr) == streams
        shown.show(1, b" ended\n")
        shown.show_lines(2, b"[1] a line\n")
    out, err = capfd.readouterr()
    assert out.count("above") == 1
    assert "look" in out
    assert out.count("\x1b[?25l") == out.count("\x1b[?25h") == 1, "the cursor"
    assert out.endswith("begun ended\n")
    assert err == f"\n{DROPPED}[1] a line\n", "on a line of its own"


def test_lines_that_rich_cannot_show(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    pretend_terminal(monkeypatch)
    with Screen(Table()) as shown:
        monkeypatch.setattr(shown._live.console, "out", fails)
        shown.show(1, b"one\ntwo\n")
        shown.show(1, b"three\n")
    out, err = capfd.readouterr()
    assert out.endswith("one\ntwo\nthree\n")
    assert err.count("no table any more (OSError: [Errno 5] Input/output error)") == 1


@pytest.mark.parametrize("has_table", [True, False], ids=["table", "lines"])
@pytest.mark.usefixtures("capfd")
def test_a_terminal_that_is_gone(has_table: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_terminal(monkeypatch)

    def gone(*_: object) -> int:
        raise OSError(5, "Input/output error")

    table = Table() if has_table else None
    with Screen(table) as shown:
        monkeypatch.setattr(screen.os, "write", gone)
        tick = make_due(shown)
        for _ in range(2):
            shown.show(1, b"printed\n")
            shown.show_lines(2, b"[1] a line\n")
            shown.say("something \udcff\n")
            tick()
        assert shown._live is None
        monkeypatch.undo()
    assert table is None or table.looks == 0, "it is not made for nobody"


def test_a_progress_bar_of_rank_0_is_above_the_table(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its line does not end for hours; what one would see of it is shown."""
    pretend_terminal(monkeypatch)
    with Screen(Table()) as shown:
        for percent in range(1000):
            shown.show(2, b"\r%d %% of \x1b[32mall" % percent)
        assert len(shown._partial[2]) < 100
        make_due(shown)()
        before = capfd.readouterr().out
        shown.show(2, b" done\n")
    assert before.count("% of") == 1
    assert before.index("999 % of") < before.index("look")
    assert "999 % of \x1b[32mall done\n" in capfd.readouterr().out


def test_nobody_reads_and_the_launcher_is_told_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pager, a logger that hangs: output waits for it, the end of the job does not."""
    monkeypatch.setattr(screen, "_URGENT_S", 0.05)
    reader, writer = os.pipe()
    asked: list[bool] = []
    try:
        with Screen() as shown:
            shown.is_urgent = lambda: bool(asked.append(True) or len(asked) > 2)
            shown._write(writer, bytes(1 << 20))
            assert len(asked) > 2, "it waits as long as nothing is urgent"
            shown._write(writer, b"more")  # and does not wait again
            asked.clear()
            shown._write(writer, b"more")
            assert not asked
    finally:
        os.close(reader)
        os.close(writer)
