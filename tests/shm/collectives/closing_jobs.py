"""What ranks do in the tests of closing a group in the middle of a collective."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from paceline.native.extension import native
from paceline.shm import BLOCKING
from tests.shm.attach.life_jobs import caught, wait_for
from tests.shm.jobs import STAGED, SUM
from tests.shm.worker_pool import RankContext

DELAY_NS = 200_000_000
TIMEOUT_S = 60.0


def poll(condition: Callable[[], Any]) -> None:
    """Wait for something to become true."""
    until_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.002)


@contextmanager
def handling(action: Callable[[], Any]) -> Iterator[None]:
    """Let SIGTERM call something, as programs do to clean up."""
    before = signal.signal(signal.SIGTERM, lambda *_: action())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def closed_at(context: RankContext, point: int, way: str, comes: bool) -> dict[str, Any]:
    """Rank 0 closes its group while its collective is at a labelled point.

    From a signal handler, from another thread, or from both at once. The other rank comes to that
    collective or does not.
    """
    with context.group() as group:
        group.barrier().wait()
        begin = wait_for(lambda: group.all_reduce(torch.ones(STAGED), SUM, BLOCKING))
        if context.rank == 1:
            context.gather(None)
            error = caught(begin) if comes else None
            context.gather(None)
            return {"error": error}
        core, closed = group._core, []

        def close() -> None:
            group.close()
            closed.append(way)

        def strike() -> None:
            poll(core.faults_fired)
            core.arm_fault(0, 1, 0, 0)
            if way in ("signal", "both"):
                os.kill(os.getpid(), signal.SIGTERM)
            if way in ("thread", "both"):
                close()

        tasks = len(os.listdir("/proc/self/task"))
        core.arm_fault(point, 1, native.FAULT_DELAY, DELAY_NS)
        thread = threading.Thread(target=strike)
        with handling(close):
            thread.start()
            context.gather(None)
            error = caught(begin)
            thread.join()
            poll(lambda: len(closed) == (2 if way == "both" else 1))
            # The kernel's thread ends a moment after Python's.
            poll(lambda: len(os.listdir("/proc/self/task")) <= tasks)
        context.gather(None)
        fired = core.faults_fired()
        return {"error": error, "fired": fired, "after": caught(lambda: group.barrier())}


def collective_in_handler(context: RankContext) -> Any:
    """A signal handler waits for collectives inside of a blocking one of the same group."""
    with context.group() as group:
        group.barrier().wait()
        if context.rank == 1:
            context.gather(None)
            return caught(wait_for(group.barrier))
        found: list[Any] = []

        def wait_for_more() -> None:
            found.append(caught(wait_for(group.barrier)))
            found.append(caught(wait_for(lambda: group.all_reduce(torch.ones(1), SUM))))
            context.gather(None)

        def strike() -> None:
            poll(lambda: group._core.row(0).life == native.LIFE_WORKING)
            os.kill(os.getpid(), signal.SIGTERM)

        thread = threading.Thread(target=strike)
        with handling(wait_for_more):
            thread.start()
            group.barrier().wait()
            thread.join()
        return found
