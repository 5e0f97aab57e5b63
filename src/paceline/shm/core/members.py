"""Who is on which host: what ranks tell each other before they share memory.

Pure except for :func:`describe_self`, which asks the system. Must not open anything.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.liveness.identity import HOST_ID_VARIABLE, host_key, hostname
from paceline.native.extension import missing_reason

__all__ = ["HOST_ID_VARIABLE", "Member", "by_host", "describe_self", "host_key"]


@dataclass(frozen=True)
class Member:
    """One rank, as it describes itself to its peers. Travels as JSON.

    Attributes:
        rank: In the group.
        host: Equal for ranks that can map each other's memory.
        hostname: For people.
        pid: In its PID namespace, which is part of ``host``.
        address: The name of the abstract socket on which it would hand out descriptors.
        token: What a peer must show at that socket.
        processors: How many it may run on.
        arena_bytes: How large the memory is that it would share.
        unavailable: Why it cannot share memory; empty if it can.
    """

    rank: int
    host: str
    hostname: str
    pid: int
    address: str
    token: str
    processors: int
    arena_bytes: int
    unavailable: str

    def to_json(self) -> dict[str, Any]:
        """Return what :meth:`from_json` takes."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any, rank: int) -> Member:
        """Check what a peer sent.

        Raises:
            ValueError: If it is no member, or claims another rank.
        """
        numbers = ("rank", "pid", "processors", "arena_bytes")
        try:
            fields: dict[str, Any] = {
                name: (int if name in numbers else str)(value[name]) for name in cls.__annotations__
            }
        except (KeyError, TypeError) as error:
            raise ValueError(f"rank {rank} sent no description of itself: {value!r}") from error
        if fields["rank"] != rank:
            raise ValueError(f"rank {rank} says that it is rank {fields['rank']}")
        return cls(**fields)


def describe_self(rank: int, arena_bytes: int) -> Member:
    """Say who and where this process is, and whether it can share memory."""
    return Member(
        rank=rank,
        host=host_key(),
        hostname=hostname(),
        pid=os.getpid(),
        address=f"paceline-{secrets.token_hex(16)}",
        token=secrets.token_hex(16),
        processors=len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1,
        arena_bytes=arena_bytes,
        unavailable=missing_reason() or "",
    )


def by_host(members: Sequence[Member]) -> list[list[Member]]:
    """Group members by host: hosts by their lowest rank, ranks in order."""
    hosts: dict[str, list[Member]] = {}
    for member in sorted(members, key=lambda member: member.rank):
        hosts.setdefault(member.host, []).append(member)
    return list(hosts.values())
