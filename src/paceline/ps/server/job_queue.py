"""Work that waits for a forked child, one child at a time. Called by ``ps/server/loop.py``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from paceline.ps.server.forked_job import FailedJob, ForkedJob

Work = Callable[[], Any]
End = Callable[[ForkedJob], None]
_MOST = 16


class Jobs:
    """A queue of work, and the child that does the first of it.

    Args:
        poller: Is told to watch the child that is at work.
    """

    def __init__(self, poller: zmq.Poller) -> None:
        self._poller = poller
        self._waiting: deque[tuple[Work, End]] = deque()
        self._current: tuple[ForkedJob, End] | None = None

    @property
    def is_busy(self) -> bool:
        """Say whether a child is at work."""
        return self._current is not None

    @property
    def fds(self) -> list[int]:
        """What to watch: of the child that is at work."""
        return [] if self._current is None else [self._current[0].fileno()]

    def add(self, work: Work, end: End, *, is_urgent: bool = False) -> bool:
        """Start work, now or when its turn comes; ``end`` is called here, with the child's job.

        Returns:
            False if too much is waiting already.
        """
        if len(self._waiting) >= _MOST:
            return False
        if is_urgent:
            self._waiting.appendleft((work, end))
        else:
            self._waiting.append((work, end))
        self._start()  # of this moment, unless another child is at work
        return True

    def tend(self, ready: dict[Any, int]) -> None:
        """End the child that is done, and start the next."""
        if self._current is None or self._current[0].fileno() not in ready:
            return
        job, end = self._current
        self._current = None
        self._poller.unregister(job.fileno())
        end(job)
        self._start()

    def cancel(self) -> None:
        """Kill the child, and forget the rest."""
        self._waiting.clear()
        if self._current is not None:
            self._current[0].cancel()
            self._current = None

    def _start(self) -> None:
        while self._current is None and self._waiting:
            work, end = self._waiting.popleft()
            try:
                job = ForkedJob(work)
            except OSError as error:
                end(FailedJob(error))
                continue
            self._current = (job, end)
            self._poller.register(job.fileno(), zmq.POLLIN)
