"""Threads that stay: a crew runs the replicas of one forward, and is there for the next.

Called by :mod:`paceline.dp.parallel_apply`. Knows nothing about torch, devices or modules: a job is
a function without arguments.

[Note: lives of a crew]
A crew has one thread per replica, so replica i is always run by the same thread and finds its
OpenMP threads and caches warm. :data:`POOL` lends a crew to one caller at a time: callers on
several threads, and wrappers inside of wrappers, each get their own. A crew that nobody has
borrowed for :data:`IDLE_S` ends itself, so no thread outlives its use and there is nothing to
close. A forked child starts without crews. What is left at the exit of the interpreter is ended
there.

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
"""How long a crew waits for work before it ends."""

Job = Callable[[], Any]
Retire = Callable[[], bool]


class Outcome:
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
        self.outcome = Outcome()

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
        """Intra-op threads that each may use; kept here by ``thread_state.py``."""
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
        """Only the first thread watches the clock: a crew ends as a whole."""
        for inbox in self._inboxes:
            is_first = inbox is self._inboxes[0]
            yield inbox, (lambda: retire(self)) if is_first else None

    def __len__(self) -> int:
        return len(self._threads)

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
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
                done.get()
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


class Pool:
    """Replica threads that nobody uses at the moment, by size."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start anew, for a forked child: the threads, and whoever held the lock, are not there."""
        self._lock = threading.Lock()
        self._idle: dict[int, list[ReplicaThreads]] = {}

    @contextlib.contextmanager
    def lend(self, size: int) -> Iterator[ReplicaThreads]:
        """Give the caller a crew for itself."""
        crew = self._take(size)
        try:
            yield crew
        finally:
            self._give_back(crew)

    def _take(self, size: int) -> ReplicaThreads:
        with self._lock:
            waiting = self._idle.get(size)
            if waiting:
                return waiting.pop()
        return ReplicaThreads(size, self._retire)

    def _give_back(self, crew: ReplicaThreads) -> None:
        if crew.is_broken:
            return
        with self._lock:
            self._idle.setdefault(len(crew), []).append(crew)

    def _retire(self, crew: ReplicaThreads) -> bool:
        """Take an idle crew out of the pool for good. False: somebody has borrowed it."""
        with self._lock:
            waiting = self._idle.get(len(crew), [])
            if crew not in waiting:
                return False
            waiting.remove(crew)
        crew.dismiss()
        return True

    def end_all(self) -> None:
        """End every idle crew and wait for it."""
        with self._lock:
            crews = [crew for waiting in self._idle.values() for crew in waiting]
            self._idle = {}
        for crew in crews:
            crew.dismiss()
        for crew in crews:
            crew.wait_ended(timeout_s=1.0)


POOL = Pool()
atexit.register(POOL.end_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=POOL.forget)
