"""Processes that play ranks of a shared-memory group, again and again, and may be killed.

A process with torch takes long to start, so a pool keeps its workers: only those that were killed
are forked anew. A *job* is a function of this repository, called in each rank with a
:class:`RankContext`. After every job a surviving worker says what it has left behind. Used inside
of one process of ``run_ranks`` (which has torch loaded and one thread): see :func:`with_workers`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection as Pipe_
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from paceline.shm import Connection, SharedGroup, connect
from paceline.testing import run_ranks

TIMEOUT_S = 90.0
HEAP_BYTES = 8 << 20

Job = Callable[..., Any]


class Hung(AssertionError):
    """A rank did not come to an end."""


@dataclass
class RankResult:
    """What became of one rank in a job.

    Attributes:
        value: What the job returned; None if the rank was killed.
        signal: What killed it, or 0.
        left: What the process had after the job that it had not before.
        pid: Its process.
    """

    value: Any
    signal: int
    left: list[str]
    pid: int


# --- in a rank -----------------------------------------------------------------------------------


class RankContext:
    """What a job has of its rank: its number, its peers, a group."""

    def __init__(self, pipe: Pipe_, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world
        self._pipe = pipe

    def gather(self, value: Any) -> list[Any]:
        """Say something to all, and hear what all said."""
        self._pipe.send(("gather", value))
        return list(self._pipe.recv())

    @contextlib.contextmanager
    def group(self, timeout_s: float = 20.0, channels: int = 1) -> Iterator[SharedGroup]:
        """Join the others in a group of shared memory; leave at the end."""
        connection = self.connect(channels)
        group = SharedGroup(connection, 0, timeout_s)
        try:
            yield group
        finally:
            group.close()
            connection.close()

    def connect(self, channels: int = 1) -> Connection:
        connection = connect(self.rank, self.gather, heap_bytes=HEAP_BYTES, channels=channels)
        assert isinstance(connection, Connection), connection
        return connection


def _possessions() -> list[str]:
    """List descriptors, shared memory and threads of this process."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if not target.startswith("/proc/"):  # this very listing
                found.append(f"descriptor {name}: {target}")
    maps = Path("/proc/self/maps").read_text().splitlines()
    found += [f"mapping {line[73:]}" for line in maps if "/memfd:paceline" in line]
    found += [f"thread {thread.name}" for thread in threading.enumerate()]
    found += [f"task {name}" for name in os.listdir("/proc/self/task")]
    return sorted(found)


def _left_since(before: list[str]) -> list[str]:
    """Say what is left; a thread that was joined is the kernel's for a moment longer."""
    until_s = time.monotonic() + 30.0
    while True:
        left = [item for item in _possessions() if item not in before]
        if time.monotonic() > until_s or not left:
            return left
        time.sleep(0.005)


def _serve(pipe: Pipe_) -> None:
    """Do jobs until the pipe is closed."""
    before = _possessions()
    while True:
        try:
            job, rank, world, arguments = pipe.recv()
        except EOFError:
            return
        try:
            value = ("value", job(RankContext(pipe, rank, world), *arguments))
        except BaseException:
            value = ("raised", traceback.format_exc())
        gc.collect()
        pipe.send(("done", value, _left_since(before)))
        del value


# --- in the parent -------------------------------------------------------------------------------


class WorkerPool:
    """Workers, and the parent's end of the talk with them."""

    def __init__(self) -> None:
        self._workers: list[tuple[int, Pipe_]] = []

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        for pid, pipe in self._workers:
            pipe.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def run(self, world: int, job: Job, *arguments: Any) -> list[RankResult]:
        """Let the first ``world`` workers do a job, and tell what became of each.

        A rank that is found stopped when all others are done is continued.
        """
        while len(self._workers) < world:
            self._workers.append(self._fork())
        for rank in range(world):
            self._workers[rank][1].send((job, rank, world, arguments))
        return _Talk(self._workers[:world], self._replace).listen()

    def _replace(self, rank: int) -> int:
        """Reap a dead worker, put a new one in its place, and return how it ended."""
        pid, pipe = self._workers[rank]
        pipe.close()
        _, status = os.waitpid(pid, 0)
        self._workers[rank] = self._fork()
        return os.waitstatus_to_exitcode(status)

    def _fork(self) -> tuple[int, Pipe_]:
        ours, theirs = Pipe()
        pid = os.fork()
        if pid == 0:
            try:
                ours.close()
                for _, pipe in self._workers:
                    with contextlib.suppress(OSError):
                        pipe.close()
                signal.signal(signal.SIGINT, signal.default_int_handler)
                _serve(theirs)
            finally:
                os._exit(0)
        theirs.close()
        return pid, ours


class _Talk:
    """One job: passes on what ranks say to each other, and waits until all are done."""

    def __init__(self, workers: list[tuple[int, Pipe_]], replace: Callable[[int], int]) -> None:
        self._pids = [pid for pid, _ in workers]
        self._pipes = {pipe: rank for rank, (_, pipe) in enumerate(workers)}
        self._replace = replace
        self._said: dict[int, Any] = {}
        self._results: dict[int, RankResult] = {}

    def listen(self) -> list[RankResult]:
        until_s = time.monotonic() + TIMEOUT_S
        while self._pipes:
            for pipe in wait(list(self._pipes), 0.05):
                self._hear(pipe)
            self._continue_the_stopped()
            if time.monotonic() > until_s:
                raise Hung(f"ranks {sorted(self._pipes.values())} of {self._pids} hang")
        return [self._results[rank] for rank in range(len(self._pids))]

    def _hear(self, pipe: Any) -> None:
        rank = self._pipes[pipe]
        try:
            message = pipe.recv()
        except (EOFError, ConnectionResetError):
            del self._pipes[pipe]
            self._results[rank] = RankResult(None, -self._replace(rank), [], self._pids[rank])
            return
        if message[0] == "gather":
            self._gather(rank, message[1])
            return
        del self._pipes[pipe]
        _, (how, value), left = message
        assert how == "value", f"rank {rank}:\n{value}"
        self._results[rank] = RankResult(value, 0, left, self._pids[rank])

    def _gather(self, rank: int, value: Any) -> None:
        self._said[rank] = value
        if len(self._said) == len(self._pids):
            answer = [self._said[rank] for rank in range(len(self._pids))]
            self._said = {}
            for pipe in self._pipes:
                pipe.send(answer)

    def _continue_the_stopped(self) -> None:
        waiting = [self._pids[rank] for rank in self._pipes.values()]
        if len(waiting) < len(self._pids) and all(_is_stopped(pid) for pid in waiting):
            for pid in waiting:
                os.kill(pid, signal.SIGCONT)


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def with_workers(part: Callable[..., Any], *arguments: Any, timeout_s: float = 100.0) -> Any:
    """Call ``part(workers, *arguments)`` in a process that may fork, and return what it returns."""

    def run() -> Any:
        gc.freeze()
        with WorkerPool() as workers:
            return part(workers, *arguments)

    return run_ranks(1, run, init=False, timeout_s=timeout_s)[0]
