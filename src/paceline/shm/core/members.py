"""Who is on which host: what ranks tell each other before they share memory.

Pure except for :func:`describe_self`, which asks the system. Must not open anything.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.liveness.identity import RankProcess, host_key
from paceline.native.extension import missing_reason
from paceline.processes import host_name


@dataclass(frozen=True)
class GroupMember(RankProcess):
    """One rank, as it describes itself to those who may share memory with it.

    Attributes:
        address: The name of the abstract socket on which it would hand out descriptors.
        token: What a peer must show at that socket.
        processors: How many it may run on.
        arena_bytes: How large the memory is that it would share.
        unavailable: Why it cannot share memory; empty if it can.
    """

    address: str
    token: str
    processors: int
    arena_bytes: int
    unavailable: str


def describe_self(rank: int, arena_bytes: int) -> GroupMember:
    """Say who and where this process is, and whether it can share memory."""
    return GroupMember(
        rank=rank,
        host=host_key(),
        hostname=host_name(),
        pid=os.getpid(),
        address=f"paceline-{secrets.token_hex(16)}",
        token=secrets.token_hex(16),
        processors=len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1,
        arena_bytes=arena_bytes,
        unavailable=missing_reason() or "",
    )


def by_host(members: Sequence[GroupMember]) -> list[list[GroupMember]]:
    """Group members by host: hosts by their lowest rank, ranks in order."""
    hosts: dict[str, list[GroupMember]] = {}
    for member in sorted(members, key=lambda member: member.rank):
        hosts.setdefault(member.host, []).append(member)
    return list(hosts.values())
