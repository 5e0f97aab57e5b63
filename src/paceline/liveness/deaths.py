"""In which order watched processes died.

[Note: who died first]
When a rank dies, others raise, and end for that reason: whoever looks later sees several that are
gone. The one to name is the first. The kernel keeps the order: an epoll hands out descriptors in
the order in which they became ready, and a pidfd becomes ready when its process has ended, however
long nobody looks. A rank that ends because of a death has seen that death before, so it comes
later in the queue. Nothing runs, and nothing wakes up, while all are alive.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading


class Deaths:
    """Watches processes by their pidfds, which stay the property of the caller unless given.

    A forked child has the parent's queue in common with it, and may not touch it: there nobody is
    ever seen dying.
    """

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._keys: dict[int, int] = {}
        self._order: list[int] = []
        self._owned: list[int] = []
        self._queue = select.epoll() if hasattr(select, "epoll") else None

    def watch(self, key: int, pidfd: int | None, *, owned: bool = False) -> None:
        """Watch a process under a key of the caller; None: it has ended already.

        Args:
            key: What :meth:`look` returns when it has died.
            pidfd: Of the process.
            owned: Close the descriptor in :meth:`close`.
        """
        if pidfd is None:
            self._order.append(key)
            return
        if owned:
            self._owned.append(pidfd)
        self._keys[pidfd] = key
        if self._queue is not None:
            self._queue.register(pidfd, select.EPOLLIN)

    def look(self, timeout_s: float = 0.0) -> list[int]:
        """Return who has died, in that order; if nobody has, wait for somebody to."""
        if os.getpid() != self._owner:
            return []
        if self._order or timeout_s <= 0:
            self._take(0.0)
        else:
            self._take(timeout_s)
        return list(self._order)

    def _take(self, timeout_s: float) -> None:
        with self._lock:
            if self._queue is None or not self._keys:
                return
            for descriptor, _ in self._queue.poll(timeout_s, len(self._keys)):
                self._queue.unregister(descriptor)
                self._order.append(self._keys.pop(descriptor))

    def close(self) -> None:
        """Close the queue and the descriptors that were given to it. Safe to repeat."""
        with self._lock:
            queue, self._queue = self._queue, None
            if queue is not None:
                queue.close()
            self._keys.clear()
            while self._owned:
                with contextlib.suppress(OSError):
                    os.close(self._owned.pop())
