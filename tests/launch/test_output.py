"""What ranks write: long lines, lines without an end, writers without an end."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.launch import output
from paceline.launch.output import LogFile, RankStream


@pytest.fixture
def numbered(tmp_path: Path) -> Iterator[tuple[RankStream, list[bytes]]]:
    """Stdout of rank 3, and the lines that are shown."""
    shown: list[bytes] = []
    log = LogFile(tmp_path / "log", pytest.fail)
    stream = RankStream(1, log, lambda _, data: shown.append(data), b"[3] ")
    yield stream, shown
    stream.close()
    log.close()


def pump(stream: RankStream, data: bytes) -> None:
    os.write(stream.writer, data)
    assert stream.pump()


def test_hours_of_a_progress_bar_are_one_line(numbered: tuple[RankStream, list[bytes]]) -> None:
    """Nor is its begin kept, which nobody sees."""
    stream, shown = numbered
    for percent in range(2000):
        pump(stream, b"\r%d %% " % percent + b"#" * 100)
    assert len(stream._partial) < 200
    pump(stream, b"\r")
    pump(stream, b"\n")
    assert shown == [b"[3] 1999 % " + b"#" * 100 + b"\n"]


def test_a_line_without_an_end(numbered: tuple[RankStream, list[bytes]]) -> None:
    stream, shown = numbered
    for _ in range(10):
        pump(stream, b"\xff" * 20_000)
    assert len(stream._partial) <= output._LINE_BYTES
    assert sum(line.count(b"\xff") for line in shown) + len(stream._partial) == 200_000


def test_ends_of_lines_as_windows_has_them(numbered: tuple[RankStream, list[bytes]]) -> None:
    stream, shown = numbered
    pump(stream, b"one\r\ntwo\r\n")
    assert shown == [b"[3] one\n[3] two\n"]
    assert stream._log.tail(2) == ["one", "two"]


def test_a_child_that_writes_for_ever_does_not_keep_the_launcher(
    numbered: tuple[RankStream, list[bytes]],
) -> None:
    """What a rank has left behind holds its stdout, and is faster than whoever reads."""
    stream, shown = numbered
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            with contextlib.suppress(BlockingIOError):
                os.write(stream.writer, b"y\n" * 2000)

    os.set_blocking(stream.writer, False)
    thread = threading.Thread(target=write)
    thread.start()
    try:
        stream.read_rest()
    finally:
        stop.set()
        thread.join()
    assert sum(map(len, shown)) <= 6 * (output._PIPE_BYTES + output._CHUNK_BYTES)
