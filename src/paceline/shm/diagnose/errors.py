"""Turns what the native core reports into errors that name rank, process, collective and remedy.

Reads the control block through ``Core.row``; called by the group when an operation did not end
well. Must not wait for anybody.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupAbortedError,
    GroupClosedError,
    PeerLostError,
)
from paceline.liveness import Deaths
from paceline.liveness.lost_peers import CONNECTION_CLOSED, NO_LONGER
from paceline.native.extension import native
from paceline.observe.stall.last_seen import last_seen
from paceline.printable import printable
from paceline.processes import state_letter
from paceline.shm.core.dtypes import describe_request, is_behind
from paceline.shm.core.members import GroupMember
from paceline.shm.core.pages import Field
from paceline.shm.diagnose.status import StatusPages, describe_end, first_cause

MISMATCH = "Detected mismatch between collectives on ranks"
"""As torch says it with TORCH_DISTRIBUTED_DEBUG=DETAIL."""


@dataclass(frozen=True)
class ChannelView:
    """What a rank knows about a channel and the ranks in it.

    Attributes:
        core: The native core of the channel.
        members: The ranks of this host, in the core's order.
        index: This rank's place among them.
        status: What they say about themselves.
        deaths: Who of them has died, in that order.
    """

    core: Any
    members: Sequence[GroupMember]
    index: int
    status: StatusPages
    deaths: Deaths

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self.members[self.index].rank


def operation_error(view: ChannelView, operation: Any) -> CollectiveError:
    """Say why a native operation failed."""
    status = operation.status()
    what = describe_request(operation.request())
    me = view.rank
    if status == native.STATUS_MISMATCH:
        return _mismatch(view.members, view.index, operation, what)
    if status == native.STATUS_SHUT:
        text = f"Rank {me}: {what} was given up, because this rank destroyed the group meanwhile."
        return GroupClosedError(text, rank=me, operation=what)
    return group_over_error(view, what)


def group_over_error(view: ChannelView, what: str) -> CollectiveError:
    """Say why the group is over, and that ``what`` cannot be done."""
    core, members, index, me = view.core, view.members, view.index, view.rank
    end, by, about = core.verdict()
    if end == native.END_LOST:
        return lost_error(view, about, what)
    if end == native.END_TIMEOUT:
        return _timed_out(core, members, me, by, about, what)
    if end == native.END_DAMAGED:
        return _damaged(me, what)
    if end == native.END_MISMATCH:
        return _deadlocked(view, by, about, what)
    who = "this rank" if by == index else str(members[by])
    text = (
        f"Rank {me}: {what} was given up, because the group was aborted by {who} "
        f"(abort() was called, or it was interrupted). {NO_LONGER}"
    )
    return GroupAbortedError(text, rank=members[by].rank, operation=what)


def _deadlocked(view: ChannelView, by: int, about: int, what: str) -> CollectiveMismatchError:
    value = view.status.pages.read(by, Field.REASON) or {}
    why = printable(value.get("text", "")) or "ranks are in different collectives."
    text = f"Rank {view.rank}: {what} cannot be completed. {MISMATCH}: {why} {NO_LONGER}"
    return CollectiveMismatchError(text, rank=view.members[about].rank, operation=what)


def _damaged(me: int, what: str) -> CollectiveError:
    text = (
        f"Rank {me}: {what} was given up, because the memory that ranks of this host share holds "
        "words that no rank writes: a program of this user, or a library in a rank, has "
        f"overwritten them. {NO_LONGER}"
    )
    return CollectiveError(text, rank=me, operation=what)


def forked_error(rank: int, pid: int) -> GroupClosedError:
    """Say that a group does not survive a fork."""
    return GroupClosedError(
        f"The group of rank {rank} belongs to process {pid} and was used in a child that was "
        "forked from it. A child has no part in the group: make a new one in it, or start workers "
        "with the 'spawn' or 'forkserver' method.",
        rank=rank,
    )


def closed_error(rank: int) -> GroupClosedError:
    """Say that a group was used after its end."""
    return GroupClosedError(
        f"Rank {rank}: the group has been destroyed. Make a new one before the next collective.",
        rank=rank,
    )


def lost_error(view: ChannelView, about: int, what: str) -> PeerLostError:
    """Say that ``what`` cannot be done without a rank that is gone, and how it came to its end.

    If that rank is gone because of another one, it is the other one that is named.
    """
    # The kernel knows who died first; a rank that was not killed has said why it went.
    died = next(iter(view.deaths.look()), about)
    index = first_cause(view.status, view.members, died)
    lost, row = view.members[index], view.core.row(index)
    how = describe_end(view.status, index, row)
    text = (
        f"Rank {view.rank}: {what} cannot be completed, because {lost} {how}\n"
        f"{_doing(row)}{last_seen(lost.pid)} {CONNECTION_CLOSED} {NO_LONGER}"
    )
    return PeerLostError(text, rank=lost.rank, host=lost.hostname, pid=lost.pid, operation=what)


def _timed_out(
    core: Any, members: Sequence[GroupMember], me: int, by: int, about: int, what: str
) -> CollectiveTimeoutError:
    rows = [core.row(index) for index in range(len(members))]
    missing = [i for i, row in enumerate(rows) if is_behind(row, rows[by])] or [about]
    told = "\n".join(f"  {members[i]}{_state(members[i].pid)}: {_doing(rows[i])}" for i in missing)
    waiter = "it" if members[by].rank == me else f"rank {members[by].rank}"
    text = (
        f"Rank {me}: {what} was given up. Timed out waiting: {waiter} had waited until the "
        f"deadline. Missing:\n{told}\n"
        "See what these ranks are doing (py-spy, or a debugger), or make the group with a longer "
        f"timeout. {NO_LONGER}"
    )
    ranks = [members[i].rank for i in missing]
    return CollectiveTimeoutError(text, rank=ranks[0], missing=ranks, operation=what)


def _mismatch(
    members: Sequence[GroupMember], index: int, operation: Any, what: str
) -> CollectiveMismatchError:
    differ = operation.mismatch()
    a, b = members[differ.first].rank, members[differ.second].rank
    me = members[index].rank
    if differ.sent_bytes != differ.expected_bytes:
        found = (
            f"rank {a} sends {differ.sent_bytes} bytes to rank {b}, which expects "
            f"{differ.expected_bytes}"
        )
    elif differ.first_request == differ.second_request:
        found = "the tensors do not all lie in shared memory"
    else:
        found = (
            f"rank {a} brought {describe_request(differ.first_request)}, but rank {b} brought "
            f"{describe_request(differ.second_request)}"
        )
    text = (
        f"Rank {me}: ranks do not agree on {what}. {MISMATCH}: {found}. Nothing was exchanged. All "
        "ranks must call the same collectives in the same order, with the same sizes and dtypes."
    )
    return CollectiveMismatchError(text, rank=b, operation=what)


def _doing(row: Any) -> str:
    ago_s = (time.monotonic_ns() - row.since_ns) / 1e9
    what = describe_request(row.request)
    if row.life == native.LIFE_WORKING:
        return f"In {what} for {ago_s:.1f} s."
    done = f"its last was {what}" if row.finished else "it has been in none yet"
    return f"In no collective for {ago_s:.1f} s; {done}."


def _state(pid: int) -> str:
    """Say if a process is stopped or has ended; most are asleep, which tells nothing."""
    told = {"": ", ended", "T": ", stopped", "t": ", stopped by a debugger", "Z": ", ended"}
    return told.get(state_letter(pid), "")
