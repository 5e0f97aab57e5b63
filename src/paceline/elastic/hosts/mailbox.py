"""Calls that other threads hand to the one that waits on a selector."""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import threading
from collections.abc import Callable


class Mailbox:
    """What :meth:`post` is given is called by the thread that waits on the selector."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._lock = threading.Lock()
        self._is_closed = False
        self._selector = selector
        selector.register(self._reader, selectors.EVENT_READ, self.open)

    def post(self, call: Callable[[], object]) -> None:
        """Have it called; in any thread. Nothing happens once this is closed."""
        with self._lock, contextlib.suppress(BlockingIOError):  # full: it wakes up anyway
            if not self._is_closed:
                self._calls.put(call)
                os.write(self._writer, b"x")

    def open(self) -> None:
        """Call what was posted."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 4096)
        while not self._calls.empty():
            self._calls.get()()

    def close(self) -> None:
        """Take no more."""
        with self._lock:
            self._is_closed = True
            self._selector.unregister(self._reader)
            os.close(self._reader)
            os.close(self._writer)
