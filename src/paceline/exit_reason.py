"""Hears of the exception with which this process ends, in time to tell its peers.

An exception ends a process in several ways, and each has its own place where it can be seen:

* nobody catches it: ``sys.excepthook``;
* it leaves the function of a ``multiprocessing`` process, ``torch.multiprocessing.spawn``'s
  included: multiprocessing runs its finalizers while the exception is in flight;
* a launcher catches it and ends the process itself: it calls :func:`note_exception`;
* ``sys.exit()``, or the end of the program: ``atexit``;
* a thread ends with it, and the process lives on: ``threading.excepthook``.

A process that is killed, crashes or calls ``os._exit`` says nothing. Called by what shares memory
with peers: see :mod:`paceline.shm.diagnose.status`. Must not know what becomes of the reason.
"""

from __future__ import annotations

import atexit
import linecache
import os
import sys
import threading
import traceback
import weakref
from dataclasses import dataclass
from multiprocessing import util
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from paceline.errors import PeerLostError

MAX_MESSAGE = 700
"""Characters of an exception's message that are passed on."""


@dataclass(frozen=True)
class ExitReason:
    """Why a process ends, as far as it knows.

    Attributes:
        text: Type, message and place of the exception; empty if there is none.
        lost_pid: The process whose loss is the reason, if that is the reason; else 0.
    """

    text: str = ""
    lost_pid: int = 0


class Listener(Protocol):
    """Whoever passes the reason on. May be called from any thread, more than once."""

    def on_process_exit(self, reason: ExitReason) -> None:
        """This process ends."""

    def on_thread_exit(self, ident: int, reason: ExitReason) -> None:
        """A thread of this process has ended with an exception; the process goes on."""


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_installed_in = 0  # the pid: what multiprocessing runs at the end is forgotten in a forked child


def add_listener(listener: Listener) -> None:
    """Tell ``listener``, as long as it lives, how this process ends."""
    global _installed_in
    _listeners.add(listener)
    if _installed_in != os.getpid():
        is_first, _installed_in = _installed_in == 0, os.getpid()
        _install(is_first)


def note_exception(error: BaseException | None) -> None:
    """This process is about to end because of ``error``. For launchers that catch it."""
    if error is not None:
        reason = exit_reason_of(error)
        for listener in list(_listeners):
            listener.on_process_exit(reason)


def exit_reason_of(error: BaseException) -> ExitReason:
    """Describe an exception and what it came from."""
    chain = _chain(error)
    told, root = chain[0], chain[-1]
    if isinstance(told, SystemExit) and not told.code:
        return ExitReason()  # the end of a program, not an accident
    text = _describe(told) if told is root else f"{_describe(told)}, after {_describe(root)}"
    lost = [each.pid for each in chain if isinstance(each, PeerLostError)]
    return ExitReason(text, next(iter(lost), 0))


def _chain(error: BaseException) -> list[BaseException]:
    """The exception and those that it came from; ``sys.exit()`` in a handler says nothing."""
    found: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in found and len(found) < 20:
        found.append(cause)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return [each for each in found if not isinstance(each, SystemExit)] or found


def _describe(error: BaseException) -> str:
    """For example ``ValueError: no such layer (train.py:12, in step)``."""
    line = "".join(traceback.format_exception_only(error)).strip()
    if len(line) > MAX_MESSAGE:
        line = line[:MAX_MESSAGE] + "..."
    place = _place(error.__traceback__)
    return f"{line} ({place})" if place else line


def _place(trace: TracebackType | None) -> str:
    """Where it was raised: the innermost line that is not torch's or ours."""
    frames = traceback.StackSummary.extract(traceback.walk_tb(trace), lookup_lines=False)
    own = [frame for frame in frames if not is_library(frame.filename)]
    if not frames:
        return ""
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno}, in {frame.name}"


_LIBRARIES = (f"{Path(__file__).parent}{os.sep}", f"{os.sep}site-packages{os.sep}torch{os.sep}")


def is_library(filename: str) -> bool:
    """Say whether a file is torch's, ours or Python's own start-up code, not the user's."""
    return filename.startswith("<") or any(part in filename for part in _LIBRARIES)


# --- where exceptions are seen -------------------------------------------------------------------


def _install(is_first: bool) -> None:
    util.Finalize(None, _on_process_end, exitpriority=1000)
    if not is_first:
        return
    linecache.checkcache()  # imported now: at the end of a process it may be too late
    _chain_hooks()
    weakref.finalize(_install, int)  # before atexit: finalizers, which close groups, then run after
    atexit.register(_on_exit)


def _chain_hooks() -> None:
    before, thread_before = sys.excepthook, threading.excepthook

    def on_uncaught(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        try:
            note_exception(error)
        finally:
            before(kind, error, trace)

    def on_uncaught_in_thread(args: Any) -> None:
        try:
            _note_thread(args.thread, args.exc_value)
        finally:
            thread_before(args)

    sys.excepthook = on_uncaught
    threading.excepthook = on_uncaught_in_thread


def _note_thread(thread: threading.Thread | None, error: BaseException | None) -> None:
    if error is None:
        return
    ident = (thread.ident if thread is not None else None) or threading.get_ident()
    for listener in list(_listeners):
        listener.on_thread_exit(ident, exit_reason_of(error))


def _on_process_end() -> None:
    """Called by multiprocessing; at the end of a child, with the exception in flight if any."""
    note_exception(sys.exc_info()[1])


def _on_exit() -> None:
    for listener in list(_listeners):
        listener.on_process_exit(ExitReason())
