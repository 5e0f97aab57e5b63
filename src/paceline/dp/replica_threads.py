"""Threads that stay: they run the replicas of one forward, and are there for the next.

Called by :mod:`paceline.dp.parallel_apply`. Knows nothing about torch, devices or modules: a job is
a function without arguments.

[Note: how long replica threads live]
A set of threads has one for each replica, so replica i is always run by the same thread and finds
its OpenMP threads and caches warm. :data:`POOL` lends a set to one caller at a time: callers on
several threads, and wrappers inside of wrappers, each get their own. A set that nobody has borrowed
for :data:`IDLE_S` ends itself, so no thread outlives its use and there is nothing to close. A
forked child starts without any. What is left at the exit of the interpreter is ended there.

Nothing here relies on the GIL: queues and one lock carry every hand-over.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any

IDLE_S = 1.0
"""How long threads wait for work before they end."""
END_S = 60.0
"""How long the exit waits for a thread that was told to end: it has nothing else to do."""
SIGNAL_CHECK_S = 0.2
"""How long a caller waits before it looks for signals: one that comes just before a wait does not
end that wait, and a Ctrl-C would be lost."""

Job = Callable[[], Any]
Retire = Callable[[], bool]


class ReplicaOutcome:
    """What became of one job: its value, or what it raised."""

    __slots__ = ("error", "value")

    def __init__(self, value: Any = None, error: BaseException | None = None) -> None:
        self.value = value
        self.error = error


class Order:
    """One job on its way to a thread, with the place where its outcome goes."""

    __slots__ = ("_done", "_job", "outcome")

    def __init__(self, job: Job, done: SimpleQueue[None]) -> None:
        self._job = job
        self._done = done
        self.outcome = ReplicaOutcome()

    def perform(self) -> None:
        """Run the job and tell the caller."""
        try:
            self.outcome.value = self._job()
        except BaseException as error:
            self.outcome.error = _without_first_frame(error)
        finally:
            self._done.put(None)


def _without_first_frame(error: BaseException) -> BaseException:
    """Cut off the frame of ``perform``: it holds the outcome, which would be a reference cycle."""
    trace = error.__traceback__
    return error.with_traceback(trace.tb_next if trace else None)


class ReplicaThreads:
    """Some threads that work for one caller at a time."""

    def __init__(self, size: int, retire: Callable[[ReplicaThreads], bool]) -> None:
        self.shares: tuple[int, ...] = ()
        """Intra-op threads that each may use; kept here by ``intraop_threads.py``."""
        self.is_broken = False
        self._inboxes: list[SimpleQueue[Order | None]] = [SimpleQueue() for _ in range(size)]
        self._threads = [
            threading.Thread(target=_work, args=args, name=f"paceline replica {i}", daemon=True)
            for i, args in enumerate(self._arguments(retire))
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # the process may have no more threads: those that began must end
            self.dismiss()
            raise

    def _arguments(
        self, retire: Callable[[ReplicaThreads], bool]
    ) -> Iterator[tuple[SimpleQueue[Order | None], Retire | None]]:
        """Only the first thread watches the clock: they end as a whole."""
        for inbox in self._inboxes:
            is_first = inbox is self._inboxes[0]
            yield inbox, (lambda: retire(self)) if is_first else None

    def __len__(self) -> int:
        return len(self._threads)

    def run(self, jobs: Sequence[Job]) -> list[ReplicaOutcome]:
        """Run one job on each thread and wait for all of them.

        An exception that reaches the *caller* while it waits (Ctrl-C, a signal handler that raises)
        is raised in the threads too, and passes on when they have ended. A second one does not
        wait.
        """
        done: SimpleQueue[None] = SimpleQueue()
        orders = [Order(job, done) for job in jobs]
        try:
            for inbox, order in zip(self._inboxes, orders, strict=True):
                inbox.put(order)
            for _ in orders:
                _wait_done(done)
        except BaseException:
            self._interrupt()
            raise
        return [order.outcome for order in orders]

    def _interrupt(self) -> None:
        self.is_broken = True
        for thread in self._threads:
            _raise_in(thread, KeyboardInterrupt)
        self.dismiss()
        for thread in self._threads:
            thread.join()

    def dismiss(self) -> None:
        """Let the threads end when they have done what they were given."""
        for inbox in self._inboxes:
            inbox.put(None)

    def wait_ended(self, timeout_s: float) -> None:
        """Wait for the threads, each for at most this long."""
        for thread in self._threads:
            thread.join(timeout_s)


def _wait_done(done: SimpleQueue[None]) -> None:
    while True:
        with contextlib.suppress(Empty):
            return done.get(timeout=SIGNAL_CHECK_S)


def _work(inbox: SimpleQueue[Order | None], retire: Retire | None) -> None:
    with contextlib.suppress(KeyboardInterrupt):  # _interrupt() meant a job, and came too late
        while (order := _next_order(inbox, retire)) is not None:
            order.perform()
            del order  # inputs and outputs must not live until the next forward


def _next_order(inbox: SimpleQueue[Order | None], retire: Retire | None) -> Order | None:
    if retire is None:
        return inbox.get()
    while True:
        try:
            return inbox.get(timeout=IDLE_S)
        except Empty:
            if retire():
                return None


def _raise_in(thread: threading.Thread, kind: type[BaseException]) -> None:
    """Raise in another thread, as soon as it runs Python code."""
    if thread.ident is not None and thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(kind)
        )


class ReplicaPool:
    """Replica threads that nobody uses at the moment, by size."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start anew, for a forked child: the threads, and whoever held the lock, are not there."""
        self._lock = threading.Lock()
        self._idle: dict[int, list[ReplicaThreads]] = {}

    @contextlib.contextmanager
    def lend(self, size: int) -> Iterator[ReplicaThreads]:
        """Give the caller threads for itself."""
        threads = self._take(size)
        try:
            yield threads
        finally:
            self._give_back(threads)

    def _take(self, size: int) -> ReplicaThreads:
        with self._lock:
            waiting = self._idle.get(size)
            if waiting:
                return waiting.pop()
        return ReplicaThreads(size, self._retire)

    def _give_back(self, threads: ReplicaThreads) -> None:
        if threads.is_broken:
            return
        with self._lock:
            self._idle.setdefault(len(threads), []).append(threads)

    def _retire(self, threads: ReplicaThreads) -> bool:
        """Take idle threads out of the pool for good. False: somebody has borrowed it."""
        with self._lock:
            waiting = self._idle.get(len(threads), [])
            if threads not in waiting:
                return False
            waiting.remove(threads)
        threads.dismiss()
        return True

    def end_all(self) -> None:
        """End all idle threads and wait for them."""
        with self._lock:
            idle = [threads for waiting in self._idle.values() for threads in waiting]
            self._idle = {}
        for threads in idle:
            threads.dismiss()
        for threads in idle:
            threads.wait_ended(END_S)


POOL = ReplicaPool()
atexit.register(POOL.end_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=POOL.forget)
