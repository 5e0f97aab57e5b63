"""How a job is ended: which signals, in which order, how far apart.

Used by ``job.py``. Pure: it is asked what is due, and does nothing itself.
"""

from __future__ import annotations

import collections
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class TimedSignal:
    """A signal for every rank that still runs.

    Attributes:
        after_s: Since the ending began.
        number: Of the signal.
        is_for_group: Also for what the rank has started; SIGINT is the rank's own affair.
    """

    after_s: float
    number: signal.Signals
    is_for_group: bool = True


def on_interrupt(limit_s: float) -> list[TimedSignal]:
    """Ctrl-C: as in one process, then harder."""
    return [
        TimedSignal(0.0, signal.SIGINT, is_for_group=False),
        TimedSignal(limit_s / 2, signal.SIGTERM),
        TimedSignal(limit_s, signal.SIGKILL),
    ]


def on_terminate(limit_s: float) -> list[TimedSignal]:
    """The launcher was told to end."""
    return [TimedSignal(0.0, signal.SIGTERM), TimedSignal(limit_s, signal.SIGKILL)]


def on_leave(limit_s: float) -> list[TimedSignal]:
    """The launcher was told to end, and ranks finish their step: with their DataLoader workers."""
    return [
        TimedSignal(0.0, signal.SIGTERM, is_for_group=False),
        TimedSignal(limit_s, signal.SIGKILL),
    ]


def on_failure(wait_s: float, limit_s: float) -> list[TimedSignal]:
    """A rank has failed. The others may find out by themselves, and say what they know."""
    return [
        TimedSignal(wait_s, signal.SIGTERM),
        TimedSignal(wait_s + limit_s, signal.SIGKILL),
    ]


AT_ONCE = [TimedSignal(0.0, signal.SIGKILL)]


class Shutdown:
    """The signals that are left; the quickest of several plans wins."""

    def __init__(self) -> None:
        self._due: collections.deque[tuple[float, TimedSignal]] = collections.deque()

    @property
    def has_begun(self) -> bool:
        """Some plan was made, and is not over."""
        return bool(self._due)

    def begin(self, signals: Iterable[TimedSignal]) -> None:
        """Make a plan; one that ends later than the present one is ignored."""
        now_s = time.monotonic()
        plan = [(now_s + each.after_s, each) for each in signals]
        if not self._due or plan[-1][0] < self._due[-1][0]:
            self._due = collections.deque(plan)

    def take_due(self) -> list[TimedSignal]:
        """What is to be done now."""
        due = []
        while self._due and self._due[0][0] <= time.monotonic():
            due.append(self._due.popleft()[1])
        return due

    def until_next_s(self) -> float | None:
        """Seconds; None if nothing is planned."""
        return max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
