"""Brings the ranks of each host together in shared memory: a collective over the whole group.

Called when a group or a wrapper is made. Every rank learns the same outcome: all of them share
memory on their hosts, or none does and all know the same reason. What carries the words between
ranks (a store, an inner group) is the caller's: :data:`~paceline.liveness.roster.Gather`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.liveness.roster import Gather
from paceline.native.extension import DISABLED, native
from paceline.shm.attach.connection import Connection
from paceline.shm.attach.fd_exchange import ExchangeClosedError, FdExchange
from paceline.shm.attach.handshake import Handshake, SharePlan, slots_bytes
from paceline.shm.core.arena import aligned
from paceline.shm.core.members import GroupMember, by_host, describe_self


@dataclass(frozen=True)
class SharingRefusal:
    """Why the ranks of this group do not share memory; the same words on every rank.

    Attributes:
        reason: For people.
        is_fault: Something is missing or broken; not just ranks that are on hosts of their own.
    """

    reason: str
    is_fault: bool


def connect(
    rank: int, gather: Gather, *, heap_bytes: int = 0, channels: int = 1
) -> Connection | SharingRefusal:
    """Share memory with the ranks of this host. Collective; never fails on some ranks only.

    Args:
        rank: In the group.
        gather: See :data:`Gather`; called three times.
        heap_bytes: How much memory for tensors to reserve; taken only when it is used.
        channels: How many independent queues of collectives.
    """
    heap_offset = channels * slots_bytes()
    arena_bytes = heap_offset + aligned(heap_bytes)
    me = describe_self(rank, arena_bytes)
    # Every rank listens before it says who it is: a peer may call at once.
    with contextlib.ExitStack() as stack:
        exchange = (
            stack.enter_context(FdExchange(me.address, me.token)) if not me.unavailable else None
        )
        answers = gather(me.to_json())
        members = tuple(GroupMember.from_json(answer, rank) for rank, answer in enumerate(answers))
        hosts = by_host(members)
        reason = _why_not(members, hosts)
        if reason is not None:
            is_fault = any(member.unavailable not in ("", DISABLED) for member in members)
            return SharingRefusal(reason, is_fault=is_fault)
        assert exchange is not None
        plan = SharePlan(members, hosts, rank, channels, heap_offset)
        return _connect_together(plan, exchange, gather)


def _connect_together(
    plan: SharePlan, exchange: FdExchange, gather: Gather
) -> Connection | SharingRefusal:
    """Send, then map, on all ranks, or on none. See [Note: two rounds]."""
    with contextlib.closing(Handshake(plan, exchange)) as handshake:
        refusal = _all_do(gather, handshake.send_own)
        if refusal is not None:
            return refusal
        try:
            refusal = _all_do(gather, handshake.map_all)
        except BaseException:  # a rank is lost after this one was done
            _close(handshake.connection)
            raise
        connection = handshake.connection
    if refusal is None:
        assert connection is not None
        return connection
    _close(connection)
    return refusal


def _close(connection: Connection | None) -> None:
    if connection is not None:
        connection.close()


def _all_do(gather: Gather, step: Callable[[], None]) -> SharingRefusal | None:
    """Take a step on every rank; if it failed on some, say on which first, and why.

    A rank that failed because another one had is named last.
    """
    trouble = ["", False]
    try:
        step()
    except (OSError, ValueError) as error:
        trouble = [f"{type(error).__name__}: {error}", isinstance(error, ExchangeClosedError)]
    troubles = [(bool(late), rank, str(text)) for rank, (text, late) in enumerate(gather(trouble))]
    failed = sorted(trouble for trouble in troubles if trouble[2])
    if not failed:
        return None
    _, rank, text = failed[0]
    return SharingRefusal(
        f"rank {rank} could not share memory with its host: {text}", is_fault=True
    )


def _why_not(members: Sequence[GroupMember], hosts: list[list[GroupMember]]) -> str | None:
    for member in members:
        if member.unavailable:
            return f"rank {member.rank} on {member.hostname}: {member.unavailable}"
    if len(members) > 1 and len(hosts) == len(members):
        return "no two ranks are on the same host"
    most = max(len(host) for host in hosts)
    if most > native.MAX_WORLD:
        return f"{most} ranks on one host are more than {native.MAX_WORLD}"
    return None
