"""What can be known of each rank of a job at one moment, from its files and its process.

Gathered by :func:`look_at_ranks` for the stall report and for ``paceline doctor``. Nobody is waited
for longer than a moment: a rank that does not answer is described by what it has left.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.errors import RecordsError
from paceline.observe.membership import (
    MembershipChange,
    Standing,
    is_of_earlier_job,
    read_membership,
    standing_of,
)
from paceline.observe.private_file import write_whole
from paceline.observe.records import Activity, RankInfo, Status
from paceline.observe.ring import read_info, read_status
from paceline.observe.run_folder import RunFolder
from paceline.observe.stall.account import (
    Account,
    WatchInfo,
    read_account,
    read_watch_info,
)
from paceline.observe.stall.stacks import ask_all_stacks, innermost_place, sort_stacks
from paceline.observe.stall.threads import WORDS
from paceline.processes import (
    ProcessState,
    cpu_ticks,
    process_space,
    process_state,
)

_PAUSE_S = 0.05
_SINCE = re.compile(r", in it for [\d.]+ s")  # differs from rank to rank


@dataclass(frozen=True)
class RankView:
    """One rank.

    Attributes:
        rank: In the whole job.
        info: Who it is; None if it has recorded nothing.
        status: What it last recorded.
        state: Of its process.
        watch: How to ask it; None if it has no watchdog.
        account: What it has just said; None if it does not answer.
        stack: Of its threads, by itself or by signal; '' if unknown.
        place: Where the user's code is, by the stack.
        computes: It has used CPU time while it was looked at.
        was_asked: It had the time to answer.
        age_s: For how long it has been doing what it does; -1 if unknown (another host's clock).
        standing: Whether it takes part, where that can change: in an elastic job.
    """

    rank: int
    info: RankInfo | None
    status: Status
    state: ProcessState
    watch: WatchInfo | None = None
    account: Account | None = None
    stack: str = ""
    place: str = ""
    computes: bool = False
    was_asked: bool = False
    age_s: float = -1.0
    standing: Standing = Standing.MEMBER

    @property
    def is_silent(self) -> bool:
        """Alive, with a watchdog that does not answer: native code holds the GIL."""
        is_silent = self.was_asked and self.watch is not None and self.account is None
        return is_silent and self.state is ProcessState.ALIVE

    @property
    def may_answer(self) -> bool:
        """It was asked, has not answered, and is not known to be unable to."""
        has_ended = self.status.activity is Activity.ENDED
        is_far = self.state is ProcessState.UNKNOWN and self.account is None and not has_ended
        return self.is_silent or (is_far and self.was_asked and self.watch is not None)

    @property
    def is_waiting(self) -> bool:
        """It waits for other ranks, as far as is known."""
        if self.state in (ProcessState.DEAD, ProcessState.STOPPED) or self.is_silent:
            return False
        in_collective = self.account is not None and self.account.is_waiting
        return self.status.activity is Activity.WAITING or in_collective

    @property
    def where(self) -> str:
        """What it is doing, in words."""
        if self.standing is Standing.SPARE:
            return "a spare: it waits to take a rank's place"
        if self.standing is Standing.LEFT:
            return "no part of the job any more"
        if self.account is not None and self.account.where:
            return self.account.where
        return WORDS[self.status.activity]

    @property
    def name(self) -> str:
        """For people."""
        if self.info is None:
            return f"rank {self.rank}"
        return f"rank {self.rank} (pid {self.info.pid} on {self.info.host})"


def look_at_ranks(folder: RunFolder, answer_s: float, own: Account | None = None) -> list[RankView]:
    """Ask all ranks for accounts, and look at them.

    Args:
        folder: Of the job.
        answer_s: How long ranks have to answer.
        own: The account of this process, if it is a rank: it need not ask itself.
    """
    asked_ns, token = time.perf_counter_ns(), secrets.token_hex(8)
    views = look_at_files(folder)
    cpu = {view.rank: cpu_ticks(view.watch.pid) for view in views if view.watch is not None}
    try:
        write_whole(folder.ask, token)
        views = [replace(view, was_asked=True) for view in views]
    except OSError:
        answer_s = 0.0  # the disk is full, or the folder is another user's
    until_s = time.monotonic() + answer_s
    while True:
        views = [_with_account(folder, view, token, asked_ns, own) for view in views]
        if not any(view.may_answer for view in views) or time.monotonic() >= until_s:
            break
        time.sleep(_PAUSE_S)
    changes = read_membership(folder.membership)
    views = [_refreshed(folder, view, changes) for view in views]
    silent = [view for view in views if view.account is None and view.state is ProcessState.ALIVE]
    asked = {v.rank: (v.watch, folder.stacks(v.rank)) for v in silent if v.watch is not None}
    texts = dict(zip(asked, ask_all_stacks(list(asked.values())), strict=True))
    return [_with_stack(view, texts.get(view.rank, ""), cpu.get(view.rank, 0)) for view in views]


def look_at_files(folder: RunFolder) -> list[RankView]:
    """What can be known of all ranks without asking them."""
    changes = read_membership(folder.membership)
    found = (look_at_rank(folder, rank, changes) for rank in folder.ranks())
    views = [view for view in found if view is not None]
    infos = {view.rank: view.info for view in views if view.info is not None}
    first = infos.get(min(infos, default=0))
    if changes or first is None:
        return views
    return [v for v in views if not is_of_earlier_job(infos.get(v.rank, first), first)]


def look_at_rank(
    folder: RunFolder, rank: int, changes: Sequence[MembershipChange]
) -> RankView | None:
    """What a rank's files and its process say; None if its records cannot be read."""
    try:
        info, status = read_info(folder.events(rank)), read_status(folder.events(rank))
    except (OSError, RecordsError):
        return None
    watch = read_watch_info(folder.watch(rank))
    if watch is not None and watch.pid != info.pid:
        watch = None  # of an earlier process
    is_near = watch is not None and watch.space == process_space()
    state = ProcessState.UNKNOWN
    if is_near and watch is not None:
        state = process_state(watch.pid, watch.started)
    since_ns = status.since_ns
    age_s = (time.perf_counter_ns() - since_ns) / 1e9 if is_near and since_ns else -1.0
    is_gone = state is ProcessState.DEAD
    standing = standing_of(info, changes, is_gone=is_gone)
    return RankView(rank, info, status, state, watch, age_s=age_s, standing=standing)


def _refreshed(folder: RunFolder, view: RankView, changes: Sequence[MembershipChange]) -> RankView:
    """Look at a rank again: answers have taken a moment."""
    new = look_at_rank(folder, view.rank, changes)
    if new is None:
        return view
    return replace(new, account=view.account, was_asked=view.was_asked)


def _with_account(
    folder: RunFolder, view: RankView, token: str, asked_ns: int, own: Account | None
) -> RankView:
    if view.account is not None:
        return view
    found = own if own is not None and own.rank == view.rank else None
    if found is None:
        found = read_account(folder.account(view.rank))
    if found is None:
        return view
    # Another one may have asked at the same time: what was said after our question counts, too.
    is_near = view.state is not ProcessState.UNKNOWN
    is_new = found.token == token or (is_near and found.at_ns >= asked_ns) or found is own
    return replace(view, account=found) if is_new else view


def _with_stack(view: RankView, text: str, cpu_before: int) -> RankView:
    """Add what a rank said of its threads, or else what it wrote at a signal."""
    if view.account is not None:
        computes = view.watch is not None and cpu_ticks(view.watch.pid) > cpu_before + 1
        account = view.account
        return replace(view, stack=account.stack, place=account.place, computes=computes)
    if view.watch is None or view.state is not ProcessState.ALIVE:
        return view
    computes = cpu_ticks(view.watch.pid) > cpu_before + 1
    stack = sort_stacks(text, view.watch.trains_in)
    return replace(view, stack=stack, place=innermost_place(stack), computes=computes)


def members(views: Sequence[RankView]) -> list[RankView]:
    """Leave out spares, and those that the others go on without."""
    return [view for view in views if view.standing is Standing.MEMBER]


def still_training(views: Sequence[RankView]) -> list[RankView]:
    """Leave out also those that have ended in order: if nobody waits, they keep nobody."""
    return [v for v in members(views) if v.status.activity != Activity.ENDED or v.status.detail]


def missing_ranks(views: Sequence[RankView]) -> list[int]:
    """Return the ranks of the job that record into no file here: into another host's folder."""
    worlds = {view.info.world for view in views if view.info is not None}
    seen = {view.rank for view in views}
    if len(worlds) != 1 or max(seen) >= max(worlds):
        return []  # ranks of several jobs, or of an elastic one
    return sorted(set(range(worlds.pop())) - seen)


def behind(views: Sequence[RankView]) -> list[RankView]:
    """Return the ranks that keep the others waiting, the likeliest first."""
    views = members(views)
    if not any(view.is_waiting for view in views):
        views = still_training(views)
    gone = [v for v in views if v.state is ProcessState.DEAD]
    if gone:
        return sorted(gone, key=lambda v: v.status.beat_ns)
    stopped = [v for v in views if v.state is ProcessState.STOPPED]
    if stopped:
        return stopped
    busy = [v for v in views if not v.is_waiting]
    if busy and len(busy) < len(views):
        return sorted(busy, key=_position)
    if busy:  # nobody waits: the one that has been longest in one thing
        return by_age(busy)[:1]
    return _odd_ones(views)


def by_age(views: Sequence[RankView]) -> list[RankView]:
    """The one that has been longest in one thing first."""
    return sorted(views, key=lambda view: -view.age_s)


def _position(view: RankView) -> tuple[int, int, float]:
    """How far a rank has come in the training."""
    return view.status.step, int(view.status.activity), -view.age_s


def _odd_ones(views: Sequence[RankView]) -> list[RankView]:
    """All wait: those that wait in another collective, or step, than most."""

    def key(view: RankView) -> tuple[int, str]:
        call = view.account.collective if view.account is not None else ""
        return view.status.step, _SINCE.sub("", call)

    keys = [key(view) for view in views]
    usual = max(keys, key=lambda each: (keys.count(each), each), default=None)
    return [view for view in views if key(view) != usual]
