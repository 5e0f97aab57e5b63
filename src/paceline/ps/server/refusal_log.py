"""What a server logs about messages it refuses: enough to see what is wrong, never a flood.

Called by ``ps/server/dispatch.py``, ``ps/server/key_check.py`` and ``ps/server/zmq_socket.py``.
Whoever sends garbage must not be able to fill a disk: in each period a few lines are written, and
the rest are counted and named in one line later.
"""

from __future__ import annotations

import logging
import threading
import time

log = logging.getLogger("paceline.ps")

PERIOD_S = 10.0
LINES = 5


class RefusalLog:
    """Writes the first few refusals of each period."""

    def __init__(self) -> None:
        self.total = 0
        self._until_s = 0.0
        self._left = 0
        self._silent = 0
        self._lock = threading.RLock()

    def add(self, text: str) -> None:
        """Note one refusal. Any thread may."""
        with self._lock:
            self._add(text)

    def _add(self, text: str) -> None:
        self.total += 1
        now_s = time.monotonic()
        if now_s >= self._until_s:
            self.flush()
            self._until_s = now_s + PERIOD_S
            self._left = LINES
        if self._left:
            self._left -= 1
            log.warning("%s", text[:600])
        else:
            self._silent += 1

    def flush(self) -> None:
        """Say how many were not written."""
        if self._silent:
            log.warning("refused %d more messages, not listed", self._silent)
            self._silent = 0
