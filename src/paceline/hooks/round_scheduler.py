"""A scheduler: takes buckets through the rounds of a hook, in order, beside the backward pass.

Used by every hook that needs more than one collective for a bucket, or that computes much. Knows
jobs, rounds and groups; must not know what the rounds compute.

[Note: order of rounds]
A c10d group matches collectives by the order in which each rank starts them. A hook that starts its
second collective when its first is done starts it whenever that happens to be, which with several
buckets in flight is not the same order on every rank: on gloo, numbers of one bucket then land in
another. A scheduler has a group of its own for each round. On the group of round i, buckets come in
the order in which hooks were called, always; between groups there is no order to keep. So a
scheduler may start whatever is ready, and the link is busy while the next bucket is being
compressed.

All hooks on one process group share its scheduler: to make groups takes time, and wrappers run
their hooks in the same order on every rank anyway. These groups last until the program destroys all
of its groups, also if the one they are for is destroyed earlier: ranks would have to agree on when.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import HookOrderLostError
from paceline.forks import finalize_here
from paceline.hooks.interface import TensorFuture, failed_future, raising
from paceline.liveness import watch_of
from paceline.torch_private.groups import group_timeout

Start = Callable[[dist.ProcessGroup], "torch.futures.Future[Any]"]
"""Begins one collective on the group it is given."""

Rounds = Generator[Start, None, torch.Tensor]
"""A job: yields what begins its next collective, goes on when that is done, returns the result."""

CLOSE_TIMEOUT_S = 5.0
"""For a job that computes, or a callback that takes long, when the scheduler is let go."""

_WAKE = object()

_schedulers: weakref.WeakKeyDictionary[dist.ProcessGroup, RoundScheduler] = (
    weakref.WeakKeyDictionary()
)


def scheduler_of(parent: dist.ProcessGroup, rounds: int) -> RoundScheduler:
    """Return the scheduler of a group, with groups for so many rounds. Ranks ask in the same order.

    Collective when a scheduler or a group has to be made.
    """
    scheduler = _schedulers.get(parent)
    if scheduler is None or scheduler.is_broken():
        scheduler = _schedulers[parent] = RoundScheduler()
    scheduler.reserve(parent, rounds)
    return scheduler


def close_schedulers(timeout_s: float) -> bool:
    """End all schedulers; return whether nothing of theirs is under way any more.

    Their groups have been aborted, or have nothing to do: a collective that is still under way
    writes to what a hook remembers. Who reduces next makes a new scheduler.
    """
    closed = list(_schedulers.values())
    _schedulers.clear()
    for scheduler in closed:
        scheduler.close()
    until_s = time.monotonic() + timeout_s
    while not all(scheduler.is_idle() for scheduler in closed):
        if time.monotonic() > until_s:
            return False
        time.sleep(0.001)
    return True


class RoundScheduler:
    """One thread, one group per round."""

    def __init__(self) -> None:
        self._groups: list[dist.ProcessGroup] = []
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._worker = worker = _Worker(self._events, self._groups)
        # A daemon: it does nothing between steps, and must not keep a program alive.
        thread = threading.Thread(target=worker.serve, name="paceline-rounds", daemon=True)
        thread.start()
        self.close = finalize_here(self, _end, self._events, thread)

    def reserve(self, parent: dist.ProcessGroup, rounds: int) -> None:
        """Make groups until there are enough. Collective if some are missing."""
        while len(self._groups) < rounds:
            self._groups.append(_group_like(parent))

    def is_idle(self) -> bool:
        """Whether no collective is under way. For a scheduler that is closed."""
        return all(job.is_over or job.is_ready() for job in self._worker.active)

    def is_broken(self) -> bool:
        """Whether a job has failed, so that nothing can be submitted any more."""
        return self._worker.broken is not None

    def submit(self, what: str, rounds: Rounds) -> TensorFuture:
        """Take a job. Ranks submit the same jobs in the same order.

        Args:
            what: For errors, for example ``"int8 of bucket 2"``.
            rounds: The job.
        """
        job = _Job(what, rounds)
        self._events.put(job)
        return raising(job.future)


class _Job:
    """One bucket on its way through the rounds."""

    def __init__(self, what: str, rounds: Rounds) -> None:
        self.what = what
        self.future: TensorFuture = torch.futures.Future()
        self.issued = 0  # collectives that have been started
        self.is_over = False
        self._rounds = rounds
        self._waiting: torch.futures.Future[Any] | None = None

    def is_ready(self) -> bool:
        """Whether there is something to do now."""
        return not self.is_over and (self._waiting is None or bool(self._waiting.done()))

    def go_on(self, groups: list[dist.ProcessGroup]) -> torch.futures.Future[Any] | None:
        """Compute up to the next collective and begin it, or end. Raises what the job raises."""
        if self._waiting is not None:
            self._waiting.wait()
        try:
            start = next(self._rounds)
        except StopIteration as stop:
            self.is_over = True
            self.future.set_result(stop.value)
            return None
        self._waiting = start(groups[self.issued])
        self.issued += 1
        return self._waiting

    def fail(self, error: Exception) -> None:
        """End with an error."""
        self.is_over = True
        self._rounds.close()
        failed_future(self.future, error)


class _Worker:
    """What the thread of a scheduler does.

    It must not refer to the scheduler, whose end is its end.
    """

    def __init__(self, events: queue.SimpleQueue[Any], groups: list[dist.ProcessGroup]) -> None:
        self._events = events
        self._groups = groups
        self.active: list[_Job] = []
        self.broken: HookOrderLostError | None = None

    def serve(self) -> None:
        with torch.no_grad():
            while (event := self._events.get()) is not None:
                if isinstance(event, _Job):
                    self.active.append(event)
                self._advance()

    def _advance(self) -> None:
        """Let every job go as far as it can without overtaking. See [Note: order of rounds]."""
        before: _Job | None = None
        for job in self.active:
            while job.is_ready() and (before is None or _is_ahead(before, job)):
                self._go_on(job)
            before = job
        self.active = [job for job in self.active if not job.is_over]

    def _go_on(self, job: _Job) -> None:
        if self.broken is not None:
            job.fail(self.broken)
            return
        try:
            waiting = job.go_on(self._groups)
        except Exception as error:
            # Peers may have started what this rank did not: from here on, the order is lost.
            self.broken = HookOrderLostError(
                f"an earlier bucket failed ({job.what}: {type(error).__name__}: {error}), so this "
                "rank and its peers are no longer in the same collective. Wrap the model anew on "
                "every rank, with a new state of the hook, or start again from the latest "
                "checkpoint.",
                operation=job.what,
            )
            job.fail(error)
            return
        if waiting is not None:
            events = self._events
            waiting.add_done_callback(lambda _: events.put(_WAKE))


def _end(events: queue.SimpleQueue[Any], thread: threading.Thread) -> None:
    """End a scheduler's thread; also when the program ends, while callbacks can still run."""
    events.put(None)
    if thread is not threading.current_thread():
        thread.join(CLOSE_TIMEOUT_S)


def _is_ahead(before: _Job, job: _Job) -> bool:
    return before.is_over or before.issued > job.issued


def _group_like(parent: dist.ProcessGroup) -> dist.ProcessGroup:
    """Make a further group of the same ranks, backend and time-out. Collective."""
    ranks = dist.get_process_group_ranks(parent)
    make = functools.partial(
        dist.new_group,
        ranks,
        timeout=group_timeout(parent),
        backend=dist.get_backend(parent),
        # In a subgroup the other ranks of the world do not take part.
        use_local_synchronization=len(ranks) < dist.get_world_size(),
        group_desc="paceline hook",
    )
    group: dist.ProcessGroup = watch_of(parent).call("the making of a hook's group", make)
    return group
