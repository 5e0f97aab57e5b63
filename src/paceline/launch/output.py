"""What ranks write: read from their pipes, kept in a log for each, shown on the terminal.

Called by the event loop of ``job.py``. A rank writes into pipes, never into files: a disk that is
full costs lines of the log, not the training.
"""

from __future__ import annotations

import collections
import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from paceline.observe.private_file import open_private

_CHUNK_BYTES = 1 << 16
_TAIL_BYTES = 1 << 14
_PIPE_BYTES = 1 << 20  # a launcher that is busy for a moment does not stop ranks
_LINE_BYTES = 1 << 16  # what has no end after so much is shown as if it had

Show = Callable[[int, bytes], None]
"""Writes to the terminal: descriptor 1 or 2, and bytes."""


def visible_part(line: bytes) -> bytes:
    """What one sees of a line: a progress bar goes back to its begin and writes anew."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def begun_line(data: bytes) -> bytes:
    """Of a line that has not ended, what has to be kept: hours of a progress bar are one line."""
    return visible_part(data) + b"\r" * data.endswith(b"\r")


class LogFile:
    """One rank's log. What cannot be written is left out, and that is said once.

    Args:
        path: Its file; readable by this user only.
        warn: Called with a text when the file cannot be written.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._path = path
        self._warn: Callable[[str], None] | None = warn
        self._file: BinaryIO | None = None
        self._tail: collections.deque[bytes] = collections.deque()
        self._tail_bytes = 0
        with self._forgiven():
            self._file = os.fdopen(open_private(path, os.O_APPEND), "ab", buffering=0)

    def write(self, data: bytes) -> None:
        """Append; never raises."""
        self._tail.append(data)
        self._tail_bytes += len(data)
        while self._tail_bytes - len(self._tail[0]) > _TAIL_BYTES:
            self._tail_bytes -= len(self._tail.popleft())
        self._append(data)

    def write_traceback(self, text: str) -> None:
        """Append what the rank did not write itself: it is not part of the tail."""
        is_within_line = bool(self._tail) and not self._tail[-1].endswith(b"\n")
        self._append(b"\n" * is_within_line + text.encode(errors="replace"))

    def tail(self, lines: int) -> list[str]:
        """The last lines, written or not; of a progress bar, what one would see."""
        text = b"".join(self._tail).rstrip()
        shown = [visible_part(line).decode(errors="replace") for line in text.split(b"\n")]
        return shown[-lines:] if text else []

    def _append(self, data: bytes) -> None:
        if self._file is not None:
            with self._forgiven():
                self._file.write(data)

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    @contextlib.contextmanager
    def _forgiven(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._warn is not None:
                self._warn(f"the log {self._path} is incomplete: {error.strerror}")
                self._warn = None


class RankStream:
    """Stdout or stderr of one rank, on its way.

    Args:
        number: 1 or 2.
        log: The rank's.
        show: The terminal; None hides it.
        prefix: Before each line on the terminal; empty passes bytes on as they come.
    """

    def __init__(self, number: int, log: LogFile, show: Show | None, prefix: bytes) -> None:
        self._reader, self.writer = os.pipe2(os.O_CLOEXEC)
        with contextlib.suppress(ImportError, AttributeError, OSError):
            import fcntl

            fcntl.fcntl(self._reader, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        os.set_blocking(self._reader, False)
        self._number, self._log, self._prefix = number, log, prefix
        self.show = show
        self._partial = b""

    def fileno(self) -> int:
        """To wait for what is to be read."""
        return self._reader

    def close_writer(self) -> None:
        """The rank has its copy."""
        os.close(self.writer)
        self.writer = -1

    def pump(self) -> bool:
        """Take what is there; say whether there may be more some time."""
        try:
            data = os.read(self._reader, _CHUNK_BYTES)
        except BlockingIOError:
            return True
        if data:
            self._log.write(data)
            self._display(data)
        return bool(data)

    def read_rest(self) -> None:
        """At the rank's end: take what is left, and do not wait for children that hold the pipe.

        No more than a pipe holds: a child may write for ever.
        """
        left = _PIPE_BYTES
        with contextlib.suppress(BlockingIOError):
            while left > 0 and (data := os.read(self._reader, _CHUNK_BYTES)):
                left -= len(data)
                self._log.write(data)
                self._display(data)
        if self._partial:
            self._display(b"\n")

    def close(self) -> None:
        """Let go of the pipe."""
        os.close(self._reader)
        if self.writer >= 0:
            self.close_writer()

    def _display(self, data: bytes) -> None:
        if self.show is None:
            return
        if not self._prefix:
            self.show(self._number, data)
            return
        *lines, begun = (self._partial + data).split(b"\n")
        self._partial = begun_line(begun)
        if len(self._partial) > _LINE_BYTES:
            lines.append(self._partial)
            self._partial = b""
        text = b"".join(self._prefix + visible_part(line) + b"\n" for line in lines)
        if text:
            self.show(self._number, text)
