"""The Python stacks of a process, also while native code holds its GIL: [Note: the signal].

A rank calls :class:`StackWriter`; a peer, or doctor, calls :func:`ask_all_stacks`.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from paceline.exit_reason import is_library
from paceline.observe.private_file import open_private
from paceline.observe.stall.account import MAX_STACK, WatchInfo
from paceline.observe.stall.places import own_frame
from paceline.processes import catches_signal, has_signal, signal_thread

_MAX_FILE_BYTES = 1 << 20
_WAIT_S = 1.0
_PAUSE_S = 0.02
_INNERMOST = 3
_OUR_THREADS = ("stall/watchdog.py", "diagnose/wait_monitor.py")
_FRAME = re.compile(r'\s*File "([^"]+)"')


class StackWriter:
    """Writes the stacks of all threads of this process to a file whenever a signal comes.

    Raises:
        OSError: The file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(open_private(path, os.O_APPEND | os.O_TRUNC), "w")  # noqa: SIM115
        self.signal = _free_signal()
        if self.signal:
            faulthandler.register(self.signal, file=self._file, all_threads=True, chain=False)

    def close(self) -> None:
        """Give the signal back."""
        if self.signal:
            faulthandler.unregister(self.signal)
        self._file.close()


def _free_signal() -> int:
    """Return a real-time signal that nobody here uses; 0 if there is none."""
    for number in range(signal.SIGRTMAX - 1, signal.SIGRTMIN + 2, -1):
        if signal.getsignal(number) is signal.SIG_DFL:
            return int(number)
    return 0


def ask_stacks(watch: WatchInfo, path: Path) -> str:
    """Have one process of this host write its stacks."""
    return ask_all_stacks([(watch, path)])[0]


def ask_all_stacks(asked: Sequence[tuple[WatchInfo, Path]]) -> list[str]:
    """Have processes of this host write their stacks, and return them; '' for one that does not.

    All are asked before the first is waited for: together they have as long as one.

    Args:
        asked: How to ask each, and where it writes.
    """
    sizes = [_ask(watch, path) for watch, path in asked]
    texts = [""] * len(asked)
    open_ones = {number for number, size in enumerate(sizes) if size is not None}
    until_s = time.monotonic() + _WAIT_S
    while open_ones and time.monotonic() < until_s:
        time.sleep(_PAUSE_S)
        for number in sorted(open_ones):
            watch, path = asked[number]
            is_writing = has_signal(watch.pid, watch.thread, watch.signal)  # before it is read
            texts[number] = _read_from(path, sizes[number] or 0)
            if texts[number] and not is_writing:
                open_ones.remove(number)
    return texts


def _ask(watch: WatchInfo, path: Path) -> int | None:
    """Send the signal; return how long the file was before. None: it cannot be asked."""
    if not watch.signal or not catches_signal(watch.pid, watch.signal):
        return None
    try:
        before = path.stat().st_size
        if before > _MAX_FILE_BYTES:
            os.truncate(path, 0)
            before = 0
    except OSError:
        return None
    return before if signal_thread(watch.pid, watch.thread, watch.signal) else None


def _read_from(path: Path, offset: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(4 * MAX_STACK).decode(errors="replace")
    except OSError:
        return ""


def sort_stacks(text: str, trains_in: str) -> str:
    """Put the thread that trains first, and leave our own out."""
    blocks = [block for block in re.split(r"\n(?=Thread |Current thread )", text.strip()) if block]
    theirs = [block for block in blocks if not any(part in block for part in _OUR_THREADS)]
    theirs.sort(key=lambda block: trains_in not in block.split("\n", 1)[0])
    return "\n".join("\n".join(fold(block.splitlines())) for block in theirs)[:MAX_STACK]


def fold(lines: Sequence[str]) -> list[str]:
    """Leave out frames of torch, of Python's start and our own, but for the innermost ones."""
    shown: list[str] = []
    hidden = 0
    for number, line in enumerate(lines):
        found = _FRAME.match(line)
        if found and number >= _INNERMOST and is_library(found[1]):
            hidden += 1
            continue
        if hidden:
            shown.append(f"  ... {hidden} of torch's or Paceline's")
            hidden = 0
        shown.append(line)
    return shown


def innermost_place(stacks: str) -> str:
    """The place in the user's code at which the first thread of faulthandler's stacks is."""
    places = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', stacks.split("\n\n", 1)[0])
    number = own_frame([file for file, _, _ in places])
    if number < 0:
        return ""
    file, line, function = places[number]
    return f"{file}:{line}, in {function}"
