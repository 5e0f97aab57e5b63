"""What a rank has once its host shares memory: its peers, its arena, its native cores.

Made by :mod:`paceline.shm.attach.handshake`, used by the group. Must not know about tensors.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.liveness import Deaths
from paceline.memory.segment import Mapping
from paceline.shm.core.arena import Arena
from paceline.shm.core.members import GroupMember
from paceline.shm.diagnose.status import StatusPages, describe_end, first_cause
from paceline.shm.diagnose.wait_monitor import WaitMonitor


class Descriptors:
    """Open descriptors, closed once: a second time would close somebody else's."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = list(numbers)
        self._are_open = True

    def are_open(self) -> bool:
        """Whether they have not been closed."""
        return self._are_open

    def close(self) -> None:
        """Close all of them."""
        self._are_open = False
        while self._numbers:
            with contextlib.suppress(OSError):
                os.close(self._numbers.pop())


@dataclass(frozen=True)
class Connection:
    """What a rank has once its host shares memory.

    Attributes:
        members: All ranks of the group.
        local: Those on this host, in rank order: their index here is their rank in shared memory.
        hosts: Ranks by host, in the same order on every rank.
        index: This rank's place in ``local``.
        arena: This rank's memory.
        cores: One native core for each channel.
        status: What the ranks of this host say about themselves.
        monitor: The thread that explains long waits.
        pidfds: Descriptors that the cores watch; close them after the cores.
        deaths: The ranks of this host that died, by their place in ``local``, in that order.
        keep: The mappings that the cores have addresses of.
    """

    members: tuple[GroupMember, ...]
    local: tuple[GroupMember, ...]
    hosts: tuple[tuple[int, ...], ...]
    index: int
    arena: Arena
    cores: tuple[Any, ...]
    status: StatusPages
    monitor: WaitMonitor
    pidfds: Descriptors
    deaths: Deaths
    keep: tuple[Mapping, ...]

    def is_open(self) -> bool:
        """Whether this rank has not left."""
        return self.pidfds.are_open()

    def close(self) -> None:
        """Leave: end the threads, close the descriptors. Tensors keep their memory."""
        self.monitor.close()
        for core in self.cores:
            core.close()
        self.deaths.close()
        self.pidfds.close()

    def __del__(self) -> None:
        # The collector calls this before it takes anything apart: no thread of a core may still
        # work when the mappings go.
        self.close()


def describe_rank_end(reference: weakref.ref[Connection], rank: int) -> tuple[int, str] | None:
    """Follow a rank of the group to the one with which it began, and say how that one ended.

    None for ranks of other hosts, and after the connection is closed.
    """
    connection = reference()
    if connection is None or not connection.is_open():
        return None
    index = next((i for i, m in enumerate(connection.local) if m.rank == rank), None)
    if index is None:
        return None
    index = first_cause(connection.status, connection.local, index)
    how = describe_end(connection.status, index, connection.cores[0].row(index))
    return connection.local[index].rank, how
