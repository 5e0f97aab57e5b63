"""Lets gloo's threads put their tensors down before the interpreter ends.

[Note: gloo's threads at exit]
A gloo group runs collectives on threads of its own. Such a thread tells whoever waits that a
collective is done, and lets go of the tensors after that, for which it needs the interpreter lock.
Where the program has ended in between, the lock is gone: Python ends the thread,
that goes through C++ which does not expect it, and the process dies of SIGABRT ("terminate called
without an active exception"), after all of its work was done. It takes a program that ends within
milliseconds of its last collective and has not destroyed its group, or a wrapper or a module of
torch's that keeps the group alive after it was destroyed. torch's DDP has it too.

So at exit, while the lock can still be had, the main thread gives it away until all of gloo's
threads sleep. A thread in the middle of a collective that nobody waited for sleeps as well: that
one is not helped.

Called by the DDP wrapper and by the Paceline group.
"""

from __future__ import annotations

import functools
import time
import weakref
from pathlib import Path

WORKER_NAME = "pt_gloo_runloop"
"""What torch calls these threads. The kernel keeps 15 characters."""

TIMEOUT_S = 2.0
"""For a machine so busy that a thread that only has to drop a tensor does not come to it."""

PAUSE_S = 0.001
QUIET_LOOKS = 2
"""One is not enough: while this thread looks it has the lock, and who waits for the lock sleeps."""

_TASKS = Path("/proc/self/task")


@functools.cache
def wait_for_gloo_at_exit() -> None:
    """Call :func:`wait_for_gloo` when the program ends. Once, however often it is asked for.

    Not by ``atexit``: finalizers end in the opposite order in which they were made, so this one
    comes after those of transports, groups and schedulers, which may still have used gloo.
    """
    weakref.finalize(wait_for_gloo, wait_for_gloo)  # a function lives as long as its module


def wait_for_gloo(timeout_s: float = TIMEOUT_S) -> bool:
    """Give the interpreter lock away until gloo's threads sleep; at once if there are none.

    Returns:
        Whether they do. Where there is no /proc they are not seen, and not waited for.
    """
    workers = gloo_workers()
    deadline = time.monotonic() + timeout_s
    quiet = 0 if workers else QUIET_LOOKS
    while quiet < QUIET_LOOKS and time.monotonic() < deadline:
        time.sleep(PAUSE_S)
        quiet = quiet + 1 if all(map(_is_asleep, workers)) else 0
    return quiet == QUIET_LOOKS


def gloo_workers() -> list[Path]:
    """The threads of this process on which gloo runs collectives."""
    try:
        tasks = list(_TASKS.iterdir())
    except OSError:
        return []
    return [task for task in tasks if _read(task / "comm").strip() == WORKER_NAME]


def _is_asleep(task: Path) -> bool:
    """Whether a thread waits for something, or is gone. One that only lacks a core does not."""
    state = _read(task / "stat").rpartition(")")[2].split()[:1]
    return state not in (["R"], ["D"])


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the thread has ended
        return ""
