"""c10d's ``Work`` and ``Future`` for collectives in shared memory.

The native core knows no Python, so it cannot complete a future. A thread does, which is started
when somebody first asks for a future of a collective that is not done: it waits in the core,
without the interpreter lock, for one collective after the other.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.forks import Owner
from paceline.shm.collectives.pending import InFlight

CLOSE_TIMEOUT_S = 5.0


class FutureThread:
    """Completes futures in the order in which their collectives were started."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._lock = threading.RLock()
        self._owner = Owner()

    def submit(self, complete: Callable[[], None]) -> None:
        """Call ``complete``, which waits for a collective, on the thread.

        A callback of a future runs there already, and may begin a collective and wait for its
        future (PowerSGD's does): nobody else would complete it, so that it is waited for at once.
        Nor would anybody in a forked child, where to wait raises.
        """
        if threading.current_thread() is self._thread or not self._owner.is_here():
            complete()
            return
        self._queue.put(complete)
        with self._lock:
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(
                    target=self._run, name="paceline-futures", daemon=True
                )
                self._thread.start()
        if self._is_closed:  # maybe by a signal handler, in the middle of the lines above
            self._complete_rest()

    def close(self) -> None:
        """Let what was submitted end, and the thread with it. Its collectives have ended before.

        All but those that wait for another host: these have their own time-out, and are not waited
        for. The thread is a daemon.
        """
        with self._lock:
            self._is_closed = True
            thread, self._thread = self._thread, None
            if thread is None:
                return
            self._queue.put(None)
        if thread is not threading.current_thread():
            thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while (complete := self._queue.get()) is not None:
            complete()

    def _complete_rest(self) -> None:
        """Complete what came when the thread had been told to end: its collectives are over."""
        found: list[Callable[[], None] | None] = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._queue.get_nowait())
        if None in found:
            self._queue.put(None)  # for the thread, which is still at something
        for complete in found:
            if complete is not None:
                complete()


class SharedWork(dist.Work):
    """One c10d operation, made of one or several collectives."""

    def __init__(
        self, pendings: Sequence[InFlight], result: list[torch.Tensor], futures: FutureThread
    ) -> None:
        super().__init__()
        self._pendings = pendings
        self._result = result
        self._futures = futures
        self._future: torch.futures.Future[Any] | None = None
        self._error: BaseException | None = None
        self._lock = threading.RLock()
        self.is_recorded: threading.Event | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until done.

        Raises:
            CollectiveError: If it failed, or is not done within ``timeout``.
        """
        timeout_s = timeout.total_seconds() if timeout else -1.0
        self.wait_for_result(timeout_s if timeout_s > 0 else -1.0)
        if self.is_recorded is not None:
            # Whoever waits may stop the profiler next, which must not happen inside of an event.
            self.is_recorded.wait()
        return True

    def wait_for_result(self, timeout_s: float = -1.0) -> None:
        """Block until the result is there, also if a profiler's event is still open."""
        for pending in self._pendings:
            pending.wait(timeout_s)

    def synchronize(self) -> None:
        """On a CPU, the same as :meth:`wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Say whether it is over, well or not. If well, the results are in the tensors."""
        return all(pending.try_finish() for pending in self._pendings)

    def is_success(self) -> bool:
        """Say whether it ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return what :meth:`wait` would raise, once it is over."""
        if self._error is None and self.is_completed():
            try:
                self.wait()
            except Exception as error:
                self._error = error
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Return the output tensors."""
        self.wait()
        return self._result

    def source_rank(self) -> int:
        """Only a receive has one, and those are the inner group's."""
        return -1

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the output tensors."""
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
                if self.is_completed():
                    self._complete()
                else:
                    self._futures.submit(self._complete)
            return self._future

    def _complete(self) -> None:
        assert self._future is not None
        try:
            self.wait()
        except Exception as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(self._result)
