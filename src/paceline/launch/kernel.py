"""What the launcher asks of the kernel: who dies with whom, and who descends from whom.

Called by both ends of :mod:`paceline.launch`. Where the system is not Linux, each says so by doing
nothing: then a process that is killed with SIGKILL may leave children of its children behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36  # <linux/prctl.h>
_END_S = 5.0


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when ``parent`` ends, however it ends."""
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:  # it was faster
        os._exit(1)


def adopt_orphans(wanted: bool = True) -> None:
    """Become the parent of descendants whose own parent ends, so that they can be found; or not."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(wanted))


@contextlib.contextmanager
def orphans_ended() -> Iterator[None]:
    """Adopt orphans in the block; at its end, kill all descendants that were not there before."""
    before = descendants(os.getpid())
    adopt_orphans()
    try:
        yield
    finally:
        _end_all_but(before)
        adopt_orphans(False)


def _end_all_but(spared: set[int]) -> None:
    killed: set[int] = set()
    until_s = time.monotonic() + _END_S
    while (left := descendants(os.getpid()) - spared) and time.monotonic() < until_s:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed |= left
        time.sleep(0.005)
    for pid in killed:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def set_process_name(name: str) -> None:
    """What ``top`` and ``ps -o comm`` show; the kernel keeps 15 bytes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()), 0, 0, 0)


def pidfd_or_none(pid: int) -> int | None:
    """A descriptor that is readable once ``pid`` has ended; None where there is none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def descendants(root: int, session: int | None = None) -> set[int]:
    """The children of a process, their children, and so on; or those of one session only.

    Zombies are not among them, but their children are: the first thread of a killed process may be
    a zombie while others still end, and until then nobody has adopted its children.
    """
    processes = _processes()
    found: set[int] = set()
    newest = {root}
    while newest:
        newest = {pid for pid, each in processes.items() if each.parent in newest} - found
        found |= newest
    return {
        pid
        for pid in found
        if not processes[pid].is_zombie and session in (None, processes[pid].session)
    }


class _Process(NamedTuple):
    parent: int
    session: int
    is_zombie: bool


def _processes() -> dict[int, _Process]:
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, _, session = path.read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):  # it ended meanwhile
            continue
        found[int(path.parent.name)] = _Process(int(parent), int(session), state == "Z")
    return found


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
