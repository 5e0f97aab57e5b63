"""Turns what the native core reports into errors that name rank, process, collective and remedy.

Reads the control block through ``Core.row``; called by the group when an operation did not end
well. Must not wait for anybody.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupAbortedError,
    GroupClosedError,
    PeerLostError,
)
from paceline.shm.dtypes import describe_request
from paceline.shm.extension import native
from paceline.shm.members import Member

NO_LONGER = "The group cannot be used any more; make a new one."


def error_for(core: Any, members: Sequence[Member], index: int, operation: Any) -> CollectiveError:
    """Say why an operation failed.

    Args:
        core: The native core.
        members: The ranks of this host, in the core's order.
        index: This rank's place among them.
        operation: The native operation.
    """
    status = operation.status()
    what = describe_request(operation.request())
    me = members[index].rank
    if status == native.STATUS_MISMATCH:
        return _mismatch(members, index, operation, what)
    if status == native.STATUS_SHUT:
        text = f"Rank {me}: {what} was given up, because this rank destroyed the group meanwhile."
        return GroupClosedError(text, rank=me, operation=what)
    return verdict_error(core, members, index, what)


def verdict_error(core: Any, members: Sequence[Member], index: int, what: str) -> CollectiveError:
    """Say why the group is over, and that ``what`` cannot be done."""
    end, by, about = core.verdict()
    me = members[index].rank
    if end == native.END_LOST:
        return _lost(core, members, me, members[about], about, what)
    if end == native.END_TIMEOUT:
        return _timed_out(core, members, me, by, about, what)
    who = "this rank" if by == index else _name(members[by])
    text = (
        f"Rank {me}: {what} was given up, because the group was aborted by {who} "
        f"(abort() was called, or it was interrupted). {NO_LONGER}"
    )
    return GroupAbortedError(text, rank=members[by].rank, operation=what)


def forked_error(members: Sequence[Member], index: int) -> GroupClosedError:
    """Say that a group does not survive a fork."""
    me = members[index]
    return GroupClosedError(
        f"The group of rank {me.rank} belongs to process {me.pid} and was used in a child that "
        "was forked from it. A child has no part in the group: make a new one in it, or start "
        "workers with the 'spawn' or 'forkserver' method.",
        rank=me.rank,
    )


def closed_error(members: Sequence[Member], index: int) -> GroupClosedError:
    """Say that a group was used after its end."""
    rank = members[index].rank
    return GroupClosedError(
        f"Rank {rank}: the group has been destroyed. Make a new one before the next collective.",
        rank=rank,
    )


def _lost(
    core: Any, members: Sequence[Member], me: int, lost: Member, index: int, what: str
) -> PeerLostError:
    row = core.row(index)
    how = "has left the group" if row[4] else "has died"
    text = (
        f"Rank {me}: {what} cannot be completed, because {_name(lost)} {how}. "
        f"{_doing(row)} Look at its log, and at the kernel's for a kill for lack of memory. "
        f"{NO_LONGER}"
    )
    return PeerLostError(text, rank=lost.rank, host=lost.hostname, pid=lost.pid, operation=what)


def _timed_out(
    core: Any, members: Sequence[Member], me: int, by: int, about: int, what: str
) -> CollectiveTimeoutError:
    reached = core.row(by)[1]
    rows = [core.row(index) for index in range(len(members))]
    # Phases count modulo 2^32.
    missing = [i for i, row in enumerate(rows) if (row[1] - reached) & 0x8000_0000] or [about]
    told = "\n".join(
        f"  {_name(members[i])}{_state(members[i].pid)}: {_doing(rows[i])}" for i in missing
    )
    waiter = "it" if members[by].rank == me else f"rank {members[by].rank}"
    text = (
        f"Rank {me}: {what} was given up, because {waiter} had waited until the deadline. "
        f"Missing:\n{told}\n"
        "See what these ranks are doing (py-spy, or a debugger), or make the group with a longer "
        f"timeout. {NO_LONGER}"
    )
    ranks = [members[i].rank for i in missing]
    return CollectiveTimeoutError(text, rank=ranks[0], missing=ranks, operation=what)


def _mismatch(
    members: Sequence[Member], index: int, operation: Any, what: str
) -> CollectiveMismatchError:
    first, second, brought, also, sent, expected = operation.mismatch()
    a, b = members[first].rank, members[second].rank
    me = members[index].rank
    if sent != expected:
        found = f"rank {a} sends {sent} bytes to rank {b}, which expects {expected}"
    elif brought == also:
        found = "the tensors do not all lie in shared memory"
    else:
        found = (
            f"rank {a} brought {describe_request(brought)}, but rank {b} brought "
            f"{describe_request(also)}"
        )
    text = (
        f"Rank {me}: ranks do not agree on {what}: {found}. Nothing was exchanged. All ranks must "
        "call the same collectives in the same order, with the same sizes and dtypes."
    )
    return CollectiveMismatchError(text, rank=b, operation=what)


def _name(member: Member) -> str:
    return f"rank {member.rank} (pid {member.pid} on {member.hostname})"


def _doing(row: tuple[Any, ...]) -> str:
    life, _, since_ns, finished, _, request = row
    ago_s = (time.monotonic_ns() - since_ns) / 1e9
    if life == native.LIFE_WORKING:
        return f"In {describe_request(request)} for {ago_s:.1f} s."
    done = f"its last was {describe_request(request)}" if finished else "it has been in none yet"
    return f"In no collective for {ago_s:.1f} s; {done}."


def _state(pid: int) -> str:
    """Say if a process is stopped or has ended; most are asleep, which tells nothing."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ", ended"
    return {"T": ", stopped", "t": ", stopped by a debugger", "Z": ", ended"}.get(state, "")
