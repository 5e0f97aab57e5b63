"""What the launcher's user sees: output of ranks, and how training goes.

Used by ``job.py``. On a terminal a live table stands below the output; elsewhere a line comes every
few seconds. What the table shows comes from the ranks' records in the run folder
(:mod:`paceline.observe.live`).
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, cast

from paceline.launch.output import begun_line, visible_part

TABLE_EVERY_S = 0.5
LINE_EVERY_S = 5.0
_HOLD_S = 0.5
"""How long lines of other ranks wait for the end of a line of rank 0 that comes in pieces."""
_LOOK_S = 0.1
_URGENT_S = 1.0
"""How long a launcher that was told to end waits for somebody who does not read its output."""
_PIECE_BYTES = select.PIPE_BUF
"""What a pipe that can be written to takes without waiting."""
_ROWS_BESIDE = 7  # lines of the terminal that are not for the rows of the table


class _Terminal(io.TextIOBase):
    """Stdout for rich: writes as the screen does, so a terminal that is gone is no error."""

    def __init__(self, write: Callable[[int, bytes], None]) -> None:
        self._write = write

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(sys.__stdout__, "encoding", None) or "utf-8"

    def write(self, text: str, /) -> int:
        self._write(1, text.encode(self.encoding, "replace"))
        return len(text)

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1


class _BegunLines:
    """For rich: lines that rank 0 has begun, as they are whenever the table is drawn."""

    def __init__(self, partial: Mapping[int, bytes]) -> None:
        self._partial = partial

    def __rich_console__(self, *_: object) -> Iterator[Any]:
        from rich.text import Text

        for data in self._partial.values():
            text = visible_part(data).decode(errors="replace")
            if text:
                yield Text.from_ansi(text, no_wrap=True, overflow="ellipsis")


class Screen:
    """Writes to stdout and stderr; one that nobody reads any more is left alone.

    What goes wrong with the table costs the table: it is dropped, which is said once.

    Args:
        table: A LiveTable; None shows output only.

    Attributes:
        is_urgent: Asked while nobody reads our output: whether to wait no longer for that.
    """

    def __init__(self, table: Any = None) -> None:
        self.is_urgent: Callable[[], bool] = lambda: False
        self._table = table
        self._closed: set[int] = set()
        self._partial: dict[int, bytes] = {1: b"", 2: b""}
        self._live: Any = None
        self._next_s = time.monotonic() + TABLE_EVERY_S
        self._last_line = ""
        self._open: set[int] = set()  # descriptors on which rank 0 is within a line
        self._held: list[tuple[int, bytes]] = []
        self._held_until_s = 0.0

    def __enter__(self) -> Screen:
        if self._table is not None and sys.stdout.isatty() and sys.stderr.isatty():
            self._streams = sys.stdout, sys.stderr
            with self._table_or_lines():
                from rich.console import Console
                from rich.live import Live

                console = Console(file=cast("IO[str]", _Terminal(self._write)))
                self._live = Live(console=console, auto_refresh=False, transient=True)
                self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._release()
        if self._live is not None:
            for number, data in self._partial.items():
                if data:
                    self.show(number, b"\n")
            with contextlib.suppress(Exception):
                self._live.stop()
            self._live = None
            sys.stdout, sys.stderr = self._streams

    @contextlib.contextmanager
    def _table_or_lines(self) -> Iterator[None]:
        """Whatever the table and rich do: no rank dies of it."""
        try:
            yield
        except Exception as error:
            self._drop_table()
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            self.say(f"paceline run: no table any more ({text}); training goes on\n")

    def _drop_table(self) -> None:
        live, self._live, self._table = self._live, None, None
        if live is None:
            return
        with contextlib.suppress(Exception):
            live.stop()  # the cursor is visible again
        sys.stdout, sys.stderr = self._streams
        for number, data in self._partial.items():
            self._partial[number] = b""
            self.show(number, data)

    def show(self, number: int, data: bytes) -> None:
        """Pass on what rank 0 wrote to descriptor ``number``, as it comes."""
        if self._live is not None:  # above the table, so in whole lines
            whole, end, begun = (self._partial[number] + data).rpartition(b"\n")
            self._partial[number] = begun_line(begun)
            if end:
                self._print(number, whole)
            return
        self._write(number, data)
        if data.endswith(b"\n"):
            self._open.discard(number)
        elif data:
            self._open.add(number)
        if not self._open:
            self._release()

    def show_lines(self, number: int, data: bytes) -> None:
        """Pass on whole lines of another rank, never into the middle of a line."""
        if self._live is not None:
            self._print(number, data.removesuffix(b"\n"))
        elif self._open:
            if not self._held:
                self._held_until_s = time.monotonic() + _HOLD_S
            self._held.append((number, data))
        else:
            self._write(number, data)

    def say(self, text: str) -> None:
        """Something of the launcher itself, in whole lines, on stderr."""
        self._release()
        self.show_lines(2, text.encode(errors="replace"))
        self._release()

    def _release(self) -> None:
        """Show what was held back, on a line of its own."""
        held, self._held = self._held, []
        if held and self._open:
            self._write(held[0][0], b"\n")
            self._open.clear()
        for number, data in held:
            self._write(number, data)

    def _print(self, number: int, lines: bytes) -> None:
        """Above the table."""
        left = lines.split(b"\n")
        with self._table_or_lines():
            while left:
                text = visible_part(left[0]).decode(errors="replace")
                self._live.console.out(text, highlight=False)
                del left[0]
        if left:
            self._write(number, b"\n".join(left) + b"\n")

    def tick(self) -> None:
        """Called often: renew what is due."""
        if self._held and time.monotonic() >= self._held_until_s:
            self._release()
        if self._table is None or time.monotonic() < self._next_s:
            return
        with self._table_or_lines():
            self._renew()

    def _renew(self) -> None:
        if self._live is not None and 1 in self._closed:
            self._drop_table()  # nobody sees it, nor that it ends
        elif self._live is not None:
            self._next_s = time.monotonic() + TABLE_EVERY_S
            self._live.update(self._render(), refresh=True)
        else:
            self._write_line()

    def _render(self) -> Any:
        """The table; above it what rank 0 has begun to write, such as a progress bar."""
        from rich.console import Group

        rows = max(1, self._live.console.height - _ROWS_BESIDE)
        return Group(_BegunLines(self._partial), self._table.render(rows))

    def _write_line(self) -> None:
        self._next_s = time.monotonic() + LINE_EVERY_S
        if not any(self._table.statuses().values()):
            return  # no rank trains with our wrapper, or not yet
        line = self._table.line()
        if line != self._last_line:
            self._last_line = line
            self.say(line + "\n")

    def until_next_s(self) -> float | None:
        """Seconds until :meth:`tick` has something to do; None for never."""
        times = [] if self._table is None else [self._next_s]
        times += [self._held_until_s] if self._held else []
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _write(self, number: int, data: bytes) -> None:
        while data and number not in self._closed:
            try:
                if self._is_writable(number):
                    data = data[os.write(number, data[:_PIECE_BYTES]) :]
                else:  # somebody has it and does not read: the launcher ends nevertheless
                    self._closed.add(number)
            except BlockingIOError:  # somebody made our terminal non-blocking
                time.sleep(0.01)
            except OSError:  # `paceline run … | head`: training goes on
                self._closed.add(number)

    def _is_writable(self, number: int) -> bool:
        """Wait until a descriptor takes something, or for a moment only once it is urgent."""
        poll = select.poll()  # of one that is closed it says something, too
        poll.register(number, select.POLLOUT)
        until_s = None
        while not poll.poll(_LOOK_S * 1000):
            if self.is_urgent():
                until_s = until_s or time.monotonic() + _URGENT_S
                if time.monotonic() >= until_s:
                    return False
        return True


def make_table(folder: Any, ranks: int) -> Any:
    """The table of what ranks record, or None where that cannot be had."""
    try:
        live = importlib.import_module("paceline.observe.live")
    except ImportError:
        return None
    return live.LiveTable(folder, range(ranks))
