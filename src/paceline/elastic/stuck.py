"""Which ranks are stopped or stuck, as far as their launcher can see.

Asked by :mod:`paceline.elastic.job` from time to time. It reads what the kernel says of a process,
and what the rank last recorded in the run folder (:mod:`paceline.observe.ring`). Must not import
torch.

[Note: who is stuck]
- A process that is stopped (SIGSTOP, SIGTSTP) for longer than the deadline. One under a debugger is
  in another state, and is left alone.
- A process whose interpreter does not answer for that long: a native call holds the GIL.
- If no process on its way to ``train(state)`` uses a processor for that long: all of them. They
  have recorded nothing yet, so nobody can be told from the others; nothing is lost either.
- If no rank has moved for longer than the deadline: those that have come least far, by step and by
  place in the step (:class:`~paceline.observe.records.Activity` is in that order). The others wait
  for them, in whatever collective.
- That may not tell them apart: all are in the same forward, say, and the others wait in its
  SyncBatchNorm. So from shortly before the deadline ranks are asked what they do
  (:mod:`paceline.observe.stall.account`). Who waits for other ranks is not killed while somebody
  does not; who does not wait, while others do, is. Between two steps, or in an evaluation or a
  compilation, it must use no processor besides: ranks may evaluate there for as long as they like,
  with collectives that nobody records. If nobody says that he waits, nobody in the same place is
  killed.
- A launcher sees its own ranks only: where an epoch has others, it tells the coordinator which of
  its ranks are still, and the coordinator compares.
"""

from __future__ import annotations

import contextlib
import enum
import os
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.elastic.members import MemberState
from paceline.errors import RecordsError
from paceline.observe.private_file import write_whole
from paceline.observe.records import Activity, Status
from paceline.observe.ring import read_info, read_status
from paceline.observe.run_folder import RunFolder
from paceline.observe.stall.account import Account, read_account, read_watch_info
from paceline.observe.stall.stacks import ask_stacks, innermost_place, sort_stacks
from paceline.processes import cpu_ticks, state_letter

_LOOKS = 4  # in the time of a deadline
_IDLE = 0.01  # who uses less of a processor does not move
_ANSWER_S = 2.0  # ranks have answered by then: their watchdogs look once in a second
_IN_STEP = (Activity.FORWARD, Activity.BACKWARD, Activity.OPTIMIZER)


class Stance(enum.Enum):
    """Whether a rank that has not moved waits for others."""

    UNKNOWN = ""
    WAITS = "waits"
    HANGS = "hangs"
    """It waits for no rank, and nothing is known that it does."""


@dataclass(frozen=True)
class Observation:
    """What is seen of a rank at one moment.

    Attributes:
        is_stopped: The kernel does not run it.
        status: What it says it does; None if it has not said anything.
        state: In the job.
        silent_s: For how long its interpreter has not answered.
        cpu_s: Processor time that it has used.
        account: What it has said when it was asked just now.
    """

    is_stopped: bool
    status: Status | None
    state: MemberState = MemberState.TRAINING
    silent_s: float = 0.0
    cpu_s: float = 0.0
    account: Account | None = None

    def has_moved(self, before: Observation, after_s: float) -> bool:
        """Whether it did something since; for who is on its way, whether it used a processor."""
        if self.state is MemberState.STARTING and not self.is_stopped:
            return before.is_stopped or self._has_computed(before, after_s)
        return self._place != before._place

    def _has_computed(self, before: Observation, for_s: float) -> bool:
        return self.cpu_s - before.cpu_s > _IDLE * for_s

    def stance(self, before: Observation, for_s: float) -> Stance:
        """Whether it waits for others, if it has not moved since ``before``."""
        account = self.account
        if self.status is None:
            return Stance.UNKNOWN
        if account is None:
            is_waiting = self.status.activity is Activity.WAITING
            return Stance.WAITS if is_waiting else Stance.UNKNOWN
        if account.is_waiting:  # whoever records that he waits may be in a hook
            return Stance.WAITS
        may_last = account.is_evaluating or account.is_compiling
        if self.status.activity in _IN_STEP and not may_last:
            return Stance.HANGS
        return Stance.UNKNOWN if self._has_computed(before, for_s) else Stance.HANGS

    @property
    def _place(self) -> tuple[bool, MemberState, int, int]:
        if self.status is None:
            return self.is_stopped, self.state, 0, 0
        return self.is_stopped, self.state, self.status.since_ns, self.status.step

    @property
    def progress(self) -> tuple[int, int] | None:
        """How far it has come: the step, and the place in it; None if nobody knows."""
        return None if self.status is None else (self.status.step, self.status.activity)

    def describe(self, for_s: float) -> str:
        """Where it is, in words."""
        where, for_s = "", max(for_s, self.silent_s)
        if self.status is not None:
            where = f" in step {self.status.step} ({self.status.activity.name.lower()})"
        if self.is_stopped:
            return f"it was stopped{where} for {for_s:.0f} s"
        if self.silent_s == for_s or self.state not in (MemberState.STARTING, MemberState.TRAINING):
            return f"its interpreter did not answer{where} for {self.silent_s:.0f} s"
        if self.state is MemberState.STARTING:
            return f"it was stuck before train(state) for {for_s:.0f} s"
        return f"it was stuck{where} for {for_s:.0f} s while others waited for it"


@dataclass(frozen=True)
class Watched:
    """A member to look at."""

    member: int
    slot: int
    pid: int
    state: MemberState
    silent_s: float = 0.0


class StuckWatch:
    """Remembers since when each member has not moved.

    Args:
        folder: Of the run.
        after_s: The deadline; 0 judges nobody.

    Attributes:
        still: If ranks of other hosts have to be compared: what to tell :class:`StillRanks`.
    """

    def __init__(self, folder: RunFolder, after_s: float) -> None:
        self._folder = folder
        self._after_s = after_s
        self._since_s: dict[int, tuple[Observation, float]] = {}
        self._next_s = time.monotonic()
        self._is_near = False  # to the deadline
        self._asked_ns: int | None = None  # None: nobody has been asked
        self.still: list[Any] = []

    def until_next_s(self) -> float | None:
        """Seconds until it is time to look; None for never."""
        return max(0.0, self._next_s - time.monotonic()) if self._after_s else None

    def is_due(self) -> bool:
        """Whether it is time to look."""
        return bool(self._after_s) and time.monotonic() >= self._next_s

    def judge(self, members: Iterable[Watched], is_whole: bool = True) -> dict[int, str]:
        """Say who is to be killed, and why. Looks only if it is time.

        Args:
            members: Of this host.
            is_whole: No other host has ranks of the epoch; otherwise :attr:`still` is to be told.
        """
        now_s = time.monotonic()
        if not self.is_due():
            self.still = []
            return {}
        found = self.decide({who.member: self._look(who) for who in members}, now_s, is_whole)
        self._ask()
        self._next_s = now_s + self._again_s()
        return found

    def _again_s(self) -> float:
        usual_s = self._after_s / _LOOKS
        return usual_s if self._asked_ns is None else min(usual_s, _ANSWER_S)

    def _ask(self) -> None:
        """Let ranks say what they do, again and again, from shortly before the deadline on."""
        now_ns = time.perf_counter_ns()
        if not self._is_near:
            self._asked_ns = None
        elif self._asked_ns is None or now_ns - self._asked_ns >= _ANSWER_S * 1e9:
            self._asked_ns = now_ns
            with contextlib.suppress(OSError):  # then positions have to do
                write_whole(self._folder.ask, secrets.token_hex(8))

    def decide(
        self, seen: dict[int, Observation], now_s: float, is_whole: bool = True
    ) -> dict[int, str]:
        """The decision, apart from looking and asking."""
        before, self._since_s = self._since_s, {}
        for member, one in seen.items():
            then, since_s = before.get(member, (one, now_s))
            has_moved = one.has_moved(then, self._after_s)
            self._since_s[member] = (one, now_s) if has_moved else (then, since_s)
        still = {m: now_s - since for m, (_, since) in self._since_s.items()}
        stuck = [
            m
            for m, one in seen.items()
            if one.silent_s >= self._after_s or (one.is_stopped and still[m] >= self._after_s)
        ]
        stuck = stuck or self._stuck_together(seen, still, is_whole)
        return {member: seen[member].describe(still[member]) for member in stuck}

    def _stuck_together(
        self, seen: dict[int, Observation], still: dict[int, float], is_whole: bool
    ) -> list[int]:
        """Those that the others wait for, if nobody moves."""
        self.still = []
        starting = [m for m, one in seen.items() if one.state is MemberState.STARTING]
        inside = {m: one for m, one in seen.items() if one.state is MemberState.TRAINING}
        still_s = min((still[m] for m in inside), default=0.0)
        self._is_near = bool(inside) and still_s >= self._after_s * (1 - 1 / _LOOKS)
        if min((still[m] for m in starting), default=0.0) >= self._after_s:
            return starting
        if inside and still_s >= self._after_s:
            found = {m: self._describe(m, one, still[m]) for m, one in inside.items()}
            if is_whole:
                return waited_for(found)
            again_s = self._again_s()
            self.still = [each.to_plain(m, again_s) for m, each in found.items() if each.progress]
        return []

    def _describe(self, member: int, one: Observation, for_s: float) -> StillRank:
        stance = one.stance(self._since_s[member][0], for_s)
        return StillRank(one.progress, stance, one.describe(for_s))

    def _look(self, who: Watched) -> Observation:
        path = self._folder.events(who.slot)
        try:
            status = read_status(path) if read_info(path).pid == who.pid else None
        except (OSError, RecordsError):
            status = None
        is_stopped = state_letter(who.pid) == "T"
        cpu_s = cpu_ticks(who.pid) / os.sysconf("SC_CLK_TCK")
        account = self._read_account(who.slot)
        return Observation(is_stopped, status, who.state, who.silent_s, cpu_s, account)

    def _read_account(self, slot: int) -> Account | None:
        if self._asked_ns is None:
            return None
        found = read_account(self._folder.account(slot))
        return found if found is not None and found.at_ns >= self._asked_ns else None


@dataclass(frozen=True)
class StillRank:
    """A rank that has not moved for longer than the deadline.

    Attributes:
        progress: How far it has come.
        stance: Whether it waits for others.
        why: To be said if it is killed.
    """

    progress: tuple[int, int] | None
    stance: Stance
    why: str

    def to_plain(self, member: int, again_s: float) -> list[Any]:
        """For :class:`StillRanks`: it can be JSON."""
        assert self.progress is not None
        return [member, *self.progress, self.stance.value, self.why, again_s]


class StillRanks:
    """The coordinator's part, where an epoch has ranks of several hosts: who is waited for.

    Launchers say which of their ranks have not moved for longer than the deadline, again and again.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[float, StillRank]] = {}  # until when it counts

    def judge(self, told: list[Any], training: Iterable[int], now_s: float) -> dict[int, str]:
        """Take what a launcher says; say who is to be killed, and why.

        Args:
            told: For each rank: member, step, activity, stance, why, seconds until the launcher
                looks again.
            training: All that are in the epoch.
        """
        for member, step, activity, stance, why, again_s in told:
            seen = StillRank((int(step), int(activity)), Stance(stance), str(why))
            self._seen[int(member)] = now_s + 2 * float(again_s) + 1.0, seen
        fresh = {member: seen for member, (until_s, seen) in self._seen.items() if now_s < until_s}
        inside = set(training)
        if not inside or not inside <= fresh.keys():
            return {}
        found = waited_for({member: fresh[member] for member in inside})
        if found:
            self._seen = {}
        return {member: fresh[member].why for member in found}


def waited_for(ranks: dict[int, StillRank]) -> list[int]:
    """Those that the others wait for; nobody if that cannot be told."""
    least = least_far({member: one.progress for member, one in ranks.items()})
    waiting = {member for member, one in ranks.items() if one.stance is Stance.WAITS}
    if least and (len(waiting) == len(ranks) or not waiting.intersection(least)):
        return least
    hanging = [member for member, one in ranks.items() if one.stance is Stance.HANGS]
    return hanging if waiting else []


def least_far(progress: Mapping[int, tuple[int, int] | None]) -> list[int]:
    """Those that have come less far than others; nobody if that is not known of all."""
    known = {member: far for member, far in progress.items() if far is not None}
    if len(known) < len(progress) or len(set(known.values())) < 2:
        return []
    least = min(known.values())
    return [member for member, far in known.items() if far == least]


def where_it_is(folder: RunFolder, slot: int, pid: int) -> tuple[str, str]:
    """The place in the user's code, and the stacks, of a process that is about to be killed."""
    watch = read_watch_info(folder.watch(slot))
    if watch is None or watch.pid != pid or state_letter(pid) in ("T", "Z", ""):
        return "", ""
    stacks = sort_stacks(ask_stacks(watch, folder.stacks(slot)), watch.trains_in)
    return innermost_place(stacks), stacks
