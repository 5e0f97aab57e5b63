"""The ranks of one host exchange descriptors and map each other's memory.

Called by :mod:`paceline.shm.attach.connect`, which lets all ranks of the group know how it went.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.liveness import Deaths
from paceline.memory.descriptors import close_all
from paceline.memory.segment import Mapping, check_segment, create_segment
from paceline.native.extension import native
from paceline.shm.attach.connection import Connection, Descriptors
from paceline.shm.attach.fd_exchange import Deadline, FdExchange, FdExchangeClient
from paceline.shm.core.arena import Arena, aligned
from paceline.shm.core.members import GroupMember
from paceline.shm.core.pages import PAGE_BYTES, Pages
from paceline.shm.diagnose.status import StatusPages
from paceline.shm.diagnose.wait_monitor import WaitMonitor

SLOT_BYTES = 1 << 20
"""Of one staging slot: large enough that meetings do not cost, small enough for the cache."""
CONNECT_TIMEOUT_S = 60.0
# A wait spins while the peer is likely to run on another processor, else it yields.
SPIN_NS = 20_000
YIELDS = 8
SPARE_DESCRIPTORS = 8
"""For sockets and the like, while descriptors are passed."""


def slots_bytes() -> int:
    return int(native.SLOTS) * SLOT_BYTES if native is not None else 0


@dataclass(frozen=True)
class SharePlan:
    """Where this rank stands among all, and what it wants to share."""

    members: tuple[GroupMember, ...]
    hosts: list[list[GroupMember]]
    rank: int
    channels: int
    heap_offset: int

    @property
    def local(self) -> list[GroupMember]:
        return next(host for host in self.hosts if self.members[self.rank] in host)

    @property
    def index(self) -> int:
        return self.local.index(self.members[self.rank])

    @property
    def me(self) -> GroupMember:
        return self.members[self.rank]

    @property
    def descriptors(self) -> int:
        """How many everybody is given: the control segment, and two of each rank."""
        return 1 + 2 * len(self.local)

    @property
    def channel_bytes(self) -> int:
        return aligned(int(native.control_bytes(len(self.local))))

    @property
    def pages_offset(self) -> int:
        return self.channels * self.channel_bytes

    @property
    def control_bytes(self) -> int:
        return self.pages_offset + len(self.local) * PAGE_BYTES


class Handshake:
    """One rank's part in the hand-shake of its host.

    [Note: two rounds]
    First every rank makes what it will share and sends it to the lowest rank of its host, which
    waits for nobody. Only when all have said that they could does that rank give
    everything to everybody. So a rank that cannot (no descriptors, no memory, a limit on the size
    of files) is known to all before anybody waits at a socket, and one that is killed is seen by
    those who gather.
    """

    def __init__(self, plan: SharePlan, exchange: FdExchange) -> None:
        self._plan = plan
        self._exchange = exchange
        self._deadline = Deadline(CONNECT_TIMEOUT_S)
        self._owned: set[int] = set()
        self._mine: list[int] = []
        self._client: FdExchangeClient | None = None
        self._control = -1
        self.connection: Connection | None = None

    def send_own(self) -> None:
        """Make this rank's segments and send them to the lowest rank of the host."""
        plan = self._plan
        self._check_room()
        # The name is for people who read /proc/<pid>/maps.
        arena = create_segment(f"paceline-arena-{plan.rank}", plan.me.arena_bytes)
        self._owned.add(arena)
        # A process opens its own pidfd: nobody can mistake another process for it later.
        pidfd = os.pidfd_open(os.getpid())
        self._owned.add(pidfd)
        self._mine = [arena, pidfd]
        if plan.index == 0:
            self._make_control()
            return
        leader = plan.local[0]
        self._client = FdExchangeClient(
            leader.address, leader.token, plan.index, self._mine, self._deadline
        )

    def _check_room(self) -> None:
        """See that all descriptors will find room: a receiver that has none cannot say so."""
        needed = self._plan.descriptors + SPARE_DESCRIPTORS
        spare: list[int] = []
        try:
            spare.extend(os.dup(self._exchange.fileno()) for _ in range(needed))
        except OSError as error:
            text = f"{needed} more descriptors are needed: raise the limit (ulimit -n)"
            raise OSError(error.errno, text) from error
        finally:
            close_all(spare)

    def _make_control(self) -> None:
        plan = self._plan
        self._control = create_segment("paceline-control", plan.control_bytes)
        self._owned.add(self._control)
        mapping = Mapping(self._control, plan.control_bytes)
        for channel in range(plan.channels):
            address = mapping.address + channel * plan.channel_bytes
            native.format(address, len(plan.local), SLOT_BYTES)

    def map_all(self) -> None:
        """Take everybody's descriptors and map the memory."""
        everything = self._lead() if self._client is None else self._take(self._client)
        plan, index = self._plan, self._plan.index
        control, arenas, pidfds = everything[0], everything[1::2], everything[2::2]
        check_segment(control, plan.control_bytes)
        for descriptor, member in zip(arenas, plan.local, strict=True):
            check_segment(descriptor, member.arena_bytes)
        mapped_control = Mapping(control, plan.control_bytes)
        mapped = [
            Mapping(descriptor, member.arena_bytes, keeps_copy=at == index)
            for at, (descriptor, member) in enumerate(zip(arenas, plan.local, strict=True))
        ]
        watched = [-1 if i == index else fd for i, fd in enumerate(pidfds)]
        pages = Pages(mapped_control, plan.pages_offset, index, len(plan.local))
        doorbell = pages.doorbell_address(index)
        cores = tuple(
            _make_core(plan, channel, mapped_control, mapped, watched, doorbell)
            for channel in range(plan.channels)
        )
        kept = tuple(fd for fd in watched if fd >= 0)
        status = StatusPages(pages)
        monitor = WaitMonitor(_key(plan.local[0]), tuple(plan.local), cores, status)
        self.connection = Connection(
            members=plan.members,
            local=tuple(plan.local),
            hosts=tuple(tuple(member.rank for member in host) for host in plan.hosts),
            index=index,
            arena=Arena(mapped[index], plan.heap_offset),
            cores=cores,
            status=status,
            monitor=monitor,
            pidfds=Descriptors(kept),
            deaths=_watch_all(watched),
            keep=(mapped_control, *mapped),
        )
        self._owned.difference_update(kept)  # they are the connection's, which closes them
        monitor.start()

    def _take(self, client: FdExchangeClient) -> list[int]:
        expected = self._plan.descriptors
        everything = client.take(expected, self._deadline)
        self._owned.update(everything)
        if len(everything) != expected:
            raise ValueError(f"{len(everything)} descriptors came instead of {expected}")
        return everything

    def _lead(self) -> list[int]:
        """The lowest rank of the host gives everything to everybody."""
        world = len(self._plan.local)
        try:
            found = self._exchange.collect(range(1, world), len(self._mine), self._deadline)
            for descriptors in found.values():
                self._owned.update(descriptors)
            pairs = [self._mine, *(found[index] for index in range(1, world))]
            everything = [self._control, *(fd for pair in pairs for fd in pair)]
            self._exchange.send_all(everything, self._deadline)
        except BaseException:
            self._exchange.close()  # who waits there is told
            raise
        return everything

    def close(self) -> None:
        """Close what no connection has taken over."""
        if self._client is not None:
            self._client.close()
        close_all(self._owned)
        self._owned.clear()


def _key(leader: GroupMember) -> str:
    """Name a connection, the same on all of its ranks; not by a secret."""
    return hashlib.sha256(leader.address.encode()).hexdigest()[:16]


def _watch_all(pidfds: Sequence[int]) -> Deaths:
    deaths = Deaths()
    for index, pidfd in enumerate(pidfds):
        if pidfd >= 0:
            deaths.watch(index, pidfd)
    return deaths


def _make_core(
    plan: SharePlan,
    channel: int,
    control: Mapping,
    arenas: list[Mapping],
    pidfds: list[int],
    doorbell: int,
) -> Any:
    local = plan.local
    has_room = len(local) <= min(member.processors for member in local)
    return native.Core(
        control=control.address + channel * plan.channel_bytes,
        rank=plan.index,
        world=len(local),
        arenas=[(mapping.address, mapping.size_bytes) for mapping in arenas],
        pidfds=pidfds,
        stage_offset=channel * slots_bytes(),
        spin_ns=SPIN_NS if has_room else 0,
        yields=0 if has_room else YIELDS,
        slot_bytes=SLOT_BYTES,
        doorbell=doorbell,
    )
