"""``paceline run`` on a terminal: a table below, output above it, a sane terminal at the end."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.launch.screen import LINE_EVERY_S, TABLE_EVERY_S
from tests.cli.launched import DEADLINE_S, environ, running

pyte = pytest.importorskip("pyte", reason="needs the Python package pyte, a terminal to read from")

LINES = 40
TRAINS = """
import os, time, torch, torch.distributed as dist
from paceline import DistributedDataParallel, log
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
rank, step = dist.get_rank(), 0
open(f"{rank}.pid", "w").write(str(os.getpid()))
while True:
    step += 1
    if step <= 5: print(f"rank {rank} printed line {step} " + "of many words " * 3)
    log(loss=1 / step)
    model(torch.ones(2, 4)).sum().backward()
    time.sleep(0.02)
"""


class Terminal:
    """A pseudo-terminal with a program on it, and the screen that a user sees."""

    def __init__(self, words: list[str], cwd: Path, columns: int) -> None:
        self.screen = pyte.Screen(columns, LINES)
        self._stream = pyte.ByteStream(self.screen)
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))
        self.process = subprocess.Popen(
            words,
            cwd=cwd,
            env=environ(TERM="xterm-256color", COLUMNS=str(columns), LINES=str(LINES)),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)

    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()

    def until(self, is_met: Callable[[], bool]) -> None:
        until_s = time.monotonic() + DEADLINE_S
        while not is_met():
            assert time.monotonic() < until_s, self.text()
            if select.select([self._ours], [], [], 0.1)[0]:
                self._stream.feed(os.read(self._ours, 1 << 16))

    def drain(self) -> None:
        """To the end of the program."""
        try:
            while data := os.read(self._ours, 1 << 16):
                self._stream.feed(data)
        except OSError:  # nobody has the other end any more
            self.process.wait(DEADLINE_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 120])
def test_the_live_table(columns: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    words = [sys.executable, "-m", "paceline", "run", "-n", "2", "train.py"]
    terminal = Terminal(words, tmp_path, columns)
    try:
        printed = [
            f"{before}rank {rank} printed line {step} of many words of many words of many words"
            for rank, before in ((0, ""), (1, "[1] "))
            for step in range(1, 6)
        ]
        terminal.until(lambda: all(line in terminal.text().split("\n") for line in printed))
        terminal.until(lambda: terminal.text().count("MiB") == 2)
        lines = terminal.text().split("\n")
        head = next(n for n, line in enumerate(lines) if "samples/s" in line)
        assert sorted(lines[:head]) == sorted(printed), "the table garbles the output"
        assert [line.split()[0] for line in lines[head + 1 : head + 3]] == ["0", "1"]

        os.kill(int((tmp_path / "1.pid").read_text()), signal.SIGSTOP)
        terminal.until(lambda: "the others wait for rank 1, which is stopped" in terminal.text())
        assert terminal.text().count("samples/s") == 1, terminal.text()
        assert terminal.screen.cursor.hidden
        os.kill(int((tmp_path / "1.pid").read_text()), signal.SIGCONT)

        terminal.process.send_signal(signal.SIGINT)
        terminal.drain()
        assert terminal.process.returncode == 130
        assert not terminal.screen.cursor.hidden
        text = terminal.text()
        assert sorted(text.split("\n")[:10]) == sorted(printed)
        assert "samples/s" not in text, "the table is still there"
        assert "Traceback" not in text
        assert text.split("\n")[10:] == ["", "paceline run: interrupted; once more to kill at once"]
    finally:
        terminal.close()


ENDS = TRAINS.replace("while True:", "while not os.path.exists('go'):")


@pytest.mark.slow
def test_a_terminal_that_goes_away(tmp_path: Path) -> None:
    """A window that is closed, a connection that is cut: writing is an error from then on."""
    (tmp_path / "train.py").write_text(ENDS + "open(f'{rank}.done', 'w')")
    words = [sys.executable, "-m", "paceline", "run", "-n", "2", "train.py"]
    terminal = Terminal(words, tmp_path, 80)
    try:
        terminal.until(lambda: terminal.text().count("MiB") == 2)
        os.close(terminal._ours)
        time.sleep(2 * TABLE_EVERY_S)
        assert terminal.process.poll() is None
        (tmp_path / "go").touch()
        assert terminal.process.wait(DEADLINE_S) == 0
    finally:
        terminal._ours = os.open(os.devnull, os.O_RDONLY)
        terminal.close()
    assert (tmp_path / "0.done").exists()
    assert (tmp_path / "1.done").exists()


LINE = re.compile(r"step (\d+)")


@pytest.mark.slow
def test_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    """A line every few seconds says how a whole run goes on: here three, in a file."""
    (tmp_path / "train.py").write_text(TRAINS)
    with running("-n", "2", "train.py", cwd=tmp_path) as launcher:
        assert launcher.stderr is not None
        steps = []
        while len(steps) < 3:  # the test's deadline ends it if they do not come
            line = launcher.stderr.readline()
            assert line, launcher.communicate()
            if found := LINE.match(line):
                assert "samples/s" in line
                assert "\x1b" not in line, "a line for a file has no colours"
                steps.append(int(found[1]))
        launcher.send_signal(signal.SIGINT)
        launcher.communicate(timeout=DEADLINE_S)
    assert steps == sorted(set(steps)), "each says more than the one before"
    assert LINE_EVERY_S <= 5
