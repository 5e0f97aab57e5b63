"""What the launcher's user sees: output of ranks, and how training goes.

Used by ``job.py``. On a terminal a live table stands below the output; elsewhere a line comes every
few seconds. What the table shows comes from the ranks' records in the run folder
(:mod:`paceline.observe.live`).
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from typing import Any

TABLE_EVERY_S = 0.5
LINE_EVERY_S = 10.0
_HOLD_S = 0.5
"""So long lines of other ranks wait for the end of a line of rank 0, which comes in pieces."""


class Screen:
    """Writes to stdout and stderr; one that nobody reads any more is left alone.

    Args:
        table: A LiveTable; None shows output only.
    """

    def __init__(self, table: Any = None) -> None:
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
            from rich.live import Live

            self._live = Live(auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._release()
        if self._live is not None:
            for number, data in self._partial.items():
                if data:
                    self.show(number, b"\n")
            self._live.stop()
            self._live = None

    def show(self, number: int, data: bytes) -> None:
        """Pass on what rank 0 wrote to descriptor ``number``, as it comes."""
        if self._live is not None:  # above the table, so in whole lines
            whole, end, self._partial[number] = (self._partial[number] + data).rpartition(b"\n")
            if end:
                self._print(whole)
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
            self._print(data.removesuffix(b"\n"))
        elif self._open:
            if not self._held:
                self._held_until_s = time.monotonic() + _HOLD_S
            self._held.append((number, data))
        else:
            self._write(number, data)

    def say(self, text: str) -> None:
        """Something of the launcher itself, in whole lines, on stderr."""
        self._release()
        self.show_lines(2, text.encode())
        self._release()

    def _release(self) -> None:
        """Show what was held back, on a line of its own."""
        held, self._held = self._held, []
        if held and self._open:
            self._write(held[0][0], b"\n")
            self._open.clear()
        for number, data in held:
            self._write(number, data)

    def _print(self, lines: bytes) -> None:
        for line in lines.split(b"\n"):
            text = line.rpartition(b"\r")[2].decode(errors="replace")
            self._live.console.out(text, highlight=False)

    def tick(self) -> None:
        """Called often: renew what is due."""
        if self._held and time.monotonic() >= self._held_until_s:
            self._release()
        if self._table is None or time.monotonic() < self._next_s:
            return
        if self._live is not None:
            self._next_s = time.monotonic() + TABLE_EVERY_S
            self._live.update(self._table.render(), refresh=True)
            return
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
                data = data[os.write(number, data) :]
            except BlockingIOError:  # somebody made our terminal non-blocking
                time.sleep(0.01)
            except OSError:  # `paceline run … | head`: training goes on
                self._closed.add(number)


def make_table(folder: Any, ranks: int) -> Any:
    """The table of what ranks record, or None where that cannot be had."""
    try:
        live = importlib.import_module("paceline.observe.live")
    except ImportError:
        return None
    return live.LiveTable(folder, range(ranks))
