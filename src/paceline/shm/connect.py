"""Brings the ranks of each host together in shared memory: a collective over the whole group.

Called when a group or a wrapper is made. Every rank learns the same outcome: all of them share
memory on their hosts, or none does and all know the same reason. What carries the words between
ranks (a store, an inner group) is the caller's: :data:`Gather`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.shm.arena import Arena
from paceline.shm.extension import DISABLED, native
from paceline.shm.members import Member, by_host, describe_self
from paceline.shm.passing import Deadline, Desk, visit
from paceline.shm.segment import Mapping, check_segment, create_segment

Gather = Callable[[Any], list[Any]]
"""Gives every rank what each rank says (JSON), in rank order."""

SLOT_BYTES = 1 << 20
"""Of one staging slot: large enough that meetings do not cost, small enough for the cache."""
CONNECT_TIMEOUT_S = 60.0
# A wait spins while the peer is likely to run on another processor, else it yields.
SPIN_NS = 20_000
YIELDS = 8
_PAGE = 4096


@dataclass(frozen=True)
class Refusal:
    """Why the ranks of this group do not share memory; the same words on every rank.

    Attributes:
        reason: For people.
        is_fault: Something is missing or broken; not just ranks that are on hosts of their own.
    """

    reason: str
    is_fault: bool


class Descriptors:
    """Open descriptors, closed once: a second time would close somebody else's."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = list(numbers)

    def close(self) -> None:
        """Close all of them."""
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
        pidfds: Descriptors that the cores watch; close them after the cores.
        keep: The mappings that the cores have addresses of.
    """

    members: tuple[Member, ...]
    local: tuple[Member, ...]
    hosts: tuple[tuple[int, ...], ...]
    index: int
    arena: Arena
    cores: tuple[Any, ...]
    pidfds: Descriptors
    keep: tuple[Mapping, ...]

    def close(self) -> None:
        """Leave: end the threads, close the descriptors. Tensors keep their memory."""
        for core in self.cores:
            core.close()
        self.pidfds.close()

    def __del__(self) -> None:
        # The collector calls this before it takes anything apart: no thread of a core may still
        # work when the mappings go.
        self.close()


def connect(
    rank: int, gather: Gather, *, heap_bytes: int = 0, channels: int = 1
) -> Connection | Refusal:
    """Share memory with the ranks of this host. Collective; never fails on some ranks only.

    Args:
        rank: In the group.
        gather: See :data:`Gather`; called twice.
        heap_bytes: How much memory for tensors to reserve; taken only when it is used.
        channels: How many independent queues of collectives.
    """
    heap_offset = channels * _slots_bytes()
    arena_bytes = heap_offset + -(-heap_bytes // _PAGE) * _PAGE
    me = describe_self(rank, arena_bytes)
    # Every rank listens before it says who it is: a peer may call at once.
    with contextlib.ExitStack() as stack:
        desk = stack.enter_context(Desk(me.address, me.token)) if not me.unavailable else None
        answers = gather(me.to_json())
        members = tuple(Member.from_json(answer, rank) for rank, answer in enumerate(answers))
        hosts = by_host(members)
        reason = _why_not(members, hosts)
        if reason is not None:
            is_fault = any(member.unavailable not in ("", DISABLED) for member in members)
            return Refusal(reason, is_fault=is_fault)
        assert desk is not None
        connection: Connection | None = None
        trouble = ""
        try:
            connection = _connect_host(_Place(members, hosts, rank, channels, heap_offset), desk)
        except (OSError, ValueError) as error:
            trouble = f"{type(error).__name__}: {error}"
        troubles = [str(text) for text in gather(trouble)]
    if connection is not None and not any(troubles):
        return connection
    if connection is not None:
        connection.close()
    first = next(rank for rank, text in enumerate(troubles) if text)
    reason = f"rank {first} could not share memory with its host: {troubles[first]}"
    return Refusal(reason, is_fault=True)


def _slots_bytes() -> int:
    return int(native.SLOTS) * SLOT_BYTES if native is not None else 0


def _why_not(members: Sequence[Member], hosts: list[list[Member]]) -> str | None:
    for member in members:
        if member.unavailable:
            return f"rank {member.rank} on {member.hostname}: {member.unavailable}"
    if len(members) > 1 and len(hosts) == len(members):
        return "no two ranks are on the same host"
    most = max(len(host) for host in hosts)
    if most > native.MAX_WORLD:
        return f"{most} ranks on one host are more than {native.MAX_WORLD}"
    return None


@dataclass(frozen=True)
class _Place:
    """Where this rank stands among all, and what it wants to share."""

    members: tuple[Member, ...]
    hosts: list[list[Member]]
    rank: int
    channels: int
    heap_offset: int

    @property
    def local(self) -> list[Member]:
        return next(host for host in self.hosts if self.members[self.rank] in host)

    @property
    def index(self) -> int:
        return self.local.index(self.members[self.rank])

    @property
    def channel_bytes(self) -> int:
        return -(-int(native.control_bytes(len(self.local))) // _PAGE) * _PAGE

    @property
    def control_bytes(self) -> int:
        return self.channels * self.channel_bytes


def _connect_host(place: _Place, desk: Desk) -> Connection:
    local, index = place.local, place.index
    with _owned_descriptors() as owned:
        control, arenas, pidfds = _swap_descriptors(place, desk, owned)
        mapped_control = Mapping(control, place.control_bytes)
        mapped = [
            Mapping(descriptor, member.arena_bytes)
            for descriptor, member in zip(arenas, local, strict=True)
        ]
        watched = [-1 if i == index else fd for i, fd in enumerate(pidfds)]
        cores = tuple(
            _make_core(place, channel, mapped_control, mapped, watched)
            for channel in range(place.channels)
        )
        kept = tuple(fd for fd in watched if fd >= 0)
        owned.difference_update(kept)
    return Connection(
        members=place.members,
        local=tuple(local),
        hosts=tuple(tuple(member.rank for member in host) for host in place.hosts),
        index=index,
        arena=Arena(mapped[index], place.heap_offset),
        cores=cores,
        pidfds=Descriptors(kept),
        keep=(mapped_control, *mapped),
    )


@contextlib.contextmanager
def _owned_descriptors() -> Iterator[set[int]]:
    """Collect descriptors; whatever is still in the set at the end is closed."""
    owned: set[int] = set()
    try:
        yield owned
    finally:
        for descriptor in owned:
            os.close(descriptor)


def _swap_descriptors(
    place: _Place, desk: Desk, owned: set[int]
) -> tuple[int, list[int], list[int]]:
    """Return the control segment, every rank's arena and every rank's pidfd, in order."""
    deadline = Deadline(CONNECT_TIMEOUT_S)
    local, index = place.local, place.index
    # A process opens its own pidfd: nobody can mistake another process for it later.
    mine = [
        # The name is for people who read /proc/<pid>/maps.
        create_segment(f"paceline-arena-{place.rank}", local[index].arena_bytes),
        os.pidfd_open(os.getpid()),
    ]
    owned.update(mine)
    if index == 0:
        everything = _lead(place, desk, mine, owned, deadline)
    else:
        expected = 1 + 2 * len(local)
        leader = local[0]
        everything = visit(leader.address, leader.token, index, mine, expected, deadline)
        owned.update(everything)
        if len(everything) != expected:
            raise ValueError(f"{len(everything)} descriptors came instead of {expected}")
    control, arenas, pidfds = everything[0], everything[1::2], everything[2::2]
    check_segment(control, place.control_bytes)
    for descriptor, member in zip(arenas, local, strict=True):
        check_segment(descriptor, member.arena_bytes)
    return control, arenas, pidfds


def _lead(
    place: _Place, desk: Desk, mine: list[int], owned: set[int], deadline: Deadline
) -> list[int]:
    """The lowest rank of the host makes the control segment and gives everything to everybody."""
    world = len(place.local)
    control = create_segment("paceline-control", place.control_bytes)
    owned.add(control)
    mapping = Mapping(control, place.control_bytes)
    for channel in range(place.channels):
        native.format(mapping.address + channel * place.channel_bytes, world, SLOT_BYTES)
    found = desk.collect(range(1, world), len(mine), deadline)
    for descriptors in found.values():
        owned.update(descriptors)
    pairs = [mine, *(found[index] for index in range(1, world))]
    everything = [control, *(fd for pair in pairs for fd in pair)]
    desk.hand_out(everything, deadline)
    return everything


def _make_core(
    place: _Place, channel: int, control: Mapping, arenas: list[Mapping], pidfds: list[int]
) -> Any:
    local = place.local
    has_room = len(local) <= min(member.processors for member in local)
    return native.Core(
        control=control.address + channel * place.channel_bytes,
        rank=place.index,
        world=len(local),
        arenas=[(mapping.address, mapping.size_bytes) for mapping in arenas],
        pidfds=pidfds,
        stage_offset=channel * _slots_bytes(),
        spin_ns=SPIN_NS if has_room else 0,
        yields=0 if has_room else YIELDS,
    )
