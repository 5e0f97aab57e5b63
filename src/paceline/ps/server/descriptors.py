"""How many descriptors a server has left. Called by what listens.

Every trainer takes one descriptor, and two more for shared memory. libzmq aborts the process when
a connection over ipc finds none left, and a journal cannot be rotated: so nobody is let in before
that happens.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

MOST = 1 << 16
"""The soft limit is raised to the hard one, but not beyond this."""
_RESERVE_LEAST, _RESERVE_MOST = 128, 1024
_START = 16  # so many connections are the least that a server is of use with
_TABLE = Path("/proc/self/fd")


@dataclass(frozen=True)
class DescriptorLimit:
    """The descriptors of this process.

    Args:
        limit: RLIMIT_NOFILE.
    """

    limit: int

    @property
    def for_connections(self) -> int:
        """With so many in use, nobody is let in. The rest is for files, and for a rush."""
        least = min(_RESERVE_LEAST, self.limit // 2)
        return self.limit - min(max(self.limit // 4, least), _RESERVE_MOST)

    @property
    def for_memory(self) -> int:
        """With so many in use, trainers get no shared memory, so that more of them can come."""
        return min(self.limit // 2, self.for_connections * 3 // 4)

    @property
    def is_full(self) -> bool:
        """Say whether there is no descriptor for a further trainer."""
        return used() >= self.for_connections

    @property
    def may_share(self) -> bool:
        """Say whether there are descriptors for a trainer's shared memory."""
        return used() < self.for_memory

    @property
    def is_too_small(self) -> bool:
        """Say whether the limit is too low for a server."""
        return used() + _START > self.for_connections


def raise_descriptor_limit() -> DescriptorLimit:
    """Raise the limit as far as this user may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return DescriptorLimit(MOST if soft == resource.RLIM_INFINITY else soft)


def used() -> int:
    """How many descriptors this process has open."""
    try:
        return len(os.listdir(_TABLE))
    except FileNotFoundError:  # not Linux
        return len(os.listdir("/dev/fd"))
