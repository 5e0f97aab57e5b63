"""The listening socket of a server on ipc, and whether its name is there. For ``ServerSocket``.

libzmq accepts connections in a thread of its own, and aborts the process if there is no descriptor
for one (``accept`` with EMFILE). So it must not come to that, whatever the server's loop does.

[Note: the socket's file]
- The listening socket is ours; libzmq gets a duplicate (ZMQ_USE_FD).
- A thread waits for what libzmq tells of its connections (the socket's monitor). It does nothing
  while nobody comes.
- When a connection was accepted, it counts descriptors every millisecond until the number stays the
  same. It waits and counts without the lock of the interpreter, which the server's loop may hold
  while hundreds of connections come (``native/ps/guard.c``; without a native core it counts once
  for each event).
- When too many are in use, it renames the socket's file: nobody finds it any more, and trainers
  try again. What libzmq may still accept then is the queue of the kernel, ``_BACKLOG``, and what it
  accepted before the thread was awake: the reserve of ``ps/server/descriptors.py`` is for those.
  (To wait for arrivals at the socket itself would miss those that libzmq accepts at once.)
- While the name is away, the thread counts again every ``_AGAIN_MS``; when there is room, it puts
  the name back, and counts at once, still without the lock: whoever waits comes in that moment.
  Only this thread renames, until ``close`` has joined it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from paceline.native.extension import native
from paceline.ps.protocol.settings import full_path
from paceline.ps.server.descriptors import DescriptorLimit, used
from paceline.ps.server.private import listen_privately

log = logging.getLogger("paceline.ps")

_BACKLOG = 16
_AGAIN_MS = 100
_SAY_S = 10.0


class SocketFile:
    """A socket's file that is there while there are descriptors.

    Args:
        path: Of the socket; a file that a killed server left is replaced.
        descriptors: Of the process.

    Raises:
        OSError: The socket cannot be made.
    """

    def __init__(self, path: Path, descriptors: DescriptorLimit) -> None:
        self._path, self._aside = path, full_path(path)
        self._descriptors = descriptors
        self._is_open = True
        self._next_word_s = 0.0
        self._monitor: Any = None
        self._thread: threading.Thread | None = None
        self._aside.unlink(missing_ok=True)
        self._listener = listen_privately(path, _BACKLOG)
        self._end = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def duplicate(self) -> int:
        """A descriptor for whoever accepts, to keep."""
        return os.dup(self._listener.fileno())

    def watch(self, monitor: Any, note: Callable[[Mapping[str, Any]], None]) -> None:
        """Begin to count.

        Args:
            monitor: Of the socket that accepts; belongs to the socket file from now on.
            note: Called with each event of it, in the socket file's thread.
        """
        self._monitor = monitor
        self._thread = threading.Thread(
            target=self._watch, args=(note,), name="paceline-ps-socket-file", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread, and remove the file."""
        os.eventfd_write(self._end, 1)
        if self._thread is not None:
            self._thread.join()
            self._monitor.close(linger=0)
        os.close(self._end)
        self._listener.close()
        self._path.unlink(missing_ok=True)
        self._aside.unlink(missing_ok=True)

    def _watch(self, note: Callable[[Mapping[str, Any]], None]) -> None:
        poller = zmq.Poller()
        poller.register(self._monitor, zmq.POLLIN)
        poller.register(self._end, zmq.POLLIN)
        while True:
            is_accepted = self._take_events(note)
            try:
                if native is not None:
                    self._guard()
                    wait_ms: int | None = 0
                else:
                    self._turn(is_accepted)
                    wait_ms = None if self._is_open else _AGAIN_MS
            except OSError as error:
                log.error("the socket %s cannot be renamed: %s", self._path, error)
                wait_ms = _AGAIN_MS
            if self._end in dict(poller.poll(wait_ms)):
                return

    def _guard(self) -> None:
        """Wait for an event or for room; close or open the socket file meanwhile.

        The monitor's descriptor tells of an event only after ``_take_events`` has found no more.
        """
        limit, was_open = self._descriptors, self._is_open
        ends = (self._end, self._monitor.getsockopt(zmq.FD))
        names = map(os.fsencode, (self._path, self._aside))
        self._is_open = native.guard(*ends, was_open, limit.limit, limit.for_connections, *names)
        if was_open and not self._is_open:
            self._say()

    def _take_events(self, note: Callable[[Mapping[str, Any]], None]) -> bool:
        """Take all events of the monitor; say whether a connection was accepted."""
        is_accepted = False
        with contextlib.suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
                is_accepted |= event["event"] == zmq.EVENT_ACCEPTED
                note(event)
        return is_accepted

    def _turn(self, is_accepted: bool) -> None:
        """Without a native core: open the socket file if there is room, close it if not."""
        if not self._is_open:
            if not self._descriptors.is_full:
                self._aside.rename(self._path)
                self._is_open = True
        elif is_accepted and self._descriptors.is_full:
            self._path.rename(self._aside)
            self._is_open = False
            self._say()

    def _say(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_word_s:
            self._next_word_s = now_s + _SAY_S
            log.warning(
                "full: %d of %d descriptors are in use, so further trainers wait; raise the limit "
                "(ulimit -n, LimitNOFILE=), or start fewer trainers for each server",
                *(used(), self._descriptors.limit),
            )
