"""Whether a rank has waited too long: what it does now, against its budget.

Asked by the rank's watchdog at each look. [Note: no false alarm] in budget.py says what may take
how long. Must not write files, nor say anything.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from paceline.errors import RecordsError
from paceline.observe.records import Activity, Status
from paceline.observe.ring import read_status
from paceline.observe.run_folder import RunFolder
from paceline.observe.stall.account import Account
from paceline.observe.stall.budget import FIRST_STEPS, Budget, WaitKind, ended_s
from paceline.observe.stall.probes import probes
from paceline.observe.stall.views import (
    RankView,
    behind,
    look_at_files,
    missing_ranks,
    still_training,
)
from paceline.processes import ProcessState

_BETWEEN_STEPS = (Activity.STARTING, Activity.INPUT, Activity.REDUCED, Activity.ENDED)


class Patience:
    """Of one rank.

    Attributes:
        budget: How long things may take.
        is_of_nobody: The stall that was found last is one where no rank waits for another.
    """

    def __init__(self, folder: RunFolder, rank: int, fixed_s: float | None) -> None:
        self.budget = Budget(fixed_s)
        self.is_of_nobody = False
        self._folder, self._rank = folder, rank
        self._collective_since: tuple[str, float] = ("", 0.0)

    def learn(self, last: Status, now: Status) -> None:
        """See what has ended since the last look."""
        took_s = ended_s(last, now)
        if took_s is None:
            return
        if last.activity is Activity.WAITING:
            self.budget.learn(took_s, is_usual=last.step > FIRST_STEPS)
        else:
            self.budget.learn_work(took_s)

    def is_stalled(self, status: Status) -> bool:
        """Say whether this rank has waited too long; or, if nobody waits, whether nobody moves."""
        self.is_of_nobody = False
        if self.budget.fixed_s is not None:
            is_over = status.activity is Activity.ENDED
            return not is_over and _age_s(status) >= self.budget.fixed_s
        waited_s = self._waited_s(status)
        if waited_s >= self.budget.shortest_s:
            own = Account(self._rank, "", 0, is_waiting=True)
            views = look_at_files(self._folder)
            views = [replace(v, account=own) if v.rank == self._rank else v for v in views]
            if waited_s >= self.budget.limit_s(wait_kind(views, status)):
                return True
        self.is_of_nobody = self._nobody_moves(status)
        return self.is_of_nobody

    def is_excused(self, views: Sequence[RankView]) -> bool:
        """What looked like a stall is a compilation or an evaluation, and may take longer."""
        told = [view.account for view in behind(views) if view.account is not None]
        kinds = [WaitKind.FIRST_TIME] * any(each.is_compiling for each in told)
        kinds += [WaitKind.BETWEEN_STEPS] * any(each.is_evaluating for each in told)
        if not kinds or self.is_of_nobody or self.budget.fixed_s is not None:
            return False
        try:
            waited_s = self._waited_s(read_status(self._folder.events(self._rank)))
        except (OSError, RecordsError):
            return False
        return waited_s < max(map(self.budget.limit_s, kinds))

    def _waited_s(self, status: Status) -> float:
        """For how long this rank has waited for others."""
        age_s = _age_s(status)
        if status.activity is Activity.WAITING:
            return age_s
        if age_s < self.budget.shortest_s or status.activity is Activity.ENDED:
            return 0.0
        return self._in_collective_s()

    def _in_collective_s(self) -> float:
        """For how long the thread that trains has been inside of one call of a collective."""
        found = (each for p in probes() if (each := p.locate(p.thread)) is not None)
        inside = next(found, None)
        key = f"{inside.call}/{inside.place}" if inside is not None and inside.is_waiting else ""
        now_s = time.monotonic()
        if not key or key != self._collective_since[0]:
            self._collective_since = (key, now_s)
        return now_s - self._collective_since[1] if key else 0.0

    def _nobody_moves(self, status: Status) -> bool:
        """Say whether all ranks have been at work in one thing for too long."""
        limit_s = self.budget.limit_s(WaitKind.NOBODY_WAITS)
        if status.activity is Activity.ENDED or _age_s(status) < limit_s:
            return False
        views = still_training(look_at_files(self._folder))
        if any(view.is_waiting for view in views):
            return False  # it has a budget of its own
        return all(_still_for_s(view) >= limit_s for view in views)


def wait_kind(views: Sequence[RankView], status: Status) -> WaitKind:
    """What a rank waits for, by the rank that is furthest behind.

    Args:
        views: All ranks that are seen, the one that waits among them.
        status: Of the rank that waits.
    """
    late = behind(views)
    if late and late[0].state in (ProcessState.DEAD, ProcessState.STOPPED):
        return WaitKind.IN_STEP  # wherever it was: it will not go on
    if status.step <= FIRST_STEPS:
        return WaitKind.FIRST_TIME
    if not late and missing_ranks(views):
        return WaitKind.BETWEEN_STEPS  # nobody here knows what it does
    activity = late[0].status.activity if late else Activity.FORWARD
    return WaitKind.BETWEEN_STEPS if activity in _BETWEEN_STEPS else WaitKind.IN_STEP


def _age_s(status: Status) -> float:
    """For how long this rank has been doing what it does."""
    return (time.perf_counter_ns() - status.since_ns) / 1e9 if status.since_ns else 0.0


def _still_for_s(view: RankView) -> float:
    """The same of any rank; of one on another host, as exactly as the hosts' clocks agree."""
    if view.age_s >= 0:
        return view.age_s
    if view.info is None or not view.status.since_ns:
        return 0.0
    began_ns = view.status.since_ns + view.info.wall_minus_monotonic_ns
    return (time.time_ns() - began_ns) / 1e9
