"""Which processes an elastic job has, and where: spares, replacements, hosts with room. Pure.

The part of :mod:`paceline.elastic.membership` that does not know epochs: it says whom to start, and
keeps count.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

from paceline.elastic.hosts.places import HostTable
from paceline.elastic.members import (
    Action,
    ElasticPolicy,
    End,
    Fail,
    Fork,
    Kill,
    Member,
    MemberState,
    Release,
)

INSIDE = (MemberState.TRAINING, MemberState.READY, MemberState.DONE)
OUTSIDE = (MemberState.STARTING, MemberState.WAITING)


@dataclass
class Slot:
    """A place in the job, and how its members fared."""

    early_deaths: int = 0
    fork_at_s: float | None = None  # a replacement that is due
    is_spare: bool = False  # that replacement


@dataclass
class Roster:
    """The processes of one job.

    Attributes:
        is_scaled: Somebody has said how many ranks there are to be.
        next_id: Of the next process.
        is_started: The members that begin together are on their way.
    """

    policy: ElasticPolicy
    now_s: float = 0.0
    epoch: int = -1
    members: dict[int, Member] = field(default_factory=dict)
    hosts: HostTable = field(default_factory=HostTable)
    is_scaled: bool = False
    next_id: int = 0
    is_started: bool = False
    _is_over: bool = False
    _attempt: int = 0
    _slots: dict[int, Slot] = field(default_factory=dict)
    _gather_from_s: float = 0.0

    def __post_init__(self) -> None:
        self._gather_from_s = self.now_s

    def _shed(self, ranks: int) -> list[Action]:
        """Have so many ranks, neither more nor fewer."""
        for who in self._by_slot():
            if who.is_leaving and not who.is_terminated and who.state in INSIDE:
                who.is_leaving = False  # asked to leave before, and still there
        for slot in self._slots.values():
            if not slot.is_spare and len(self._staying()) + self._due() > ranks:
                slot.fork_at_s = None
        actions: list[Action] = []
        for who in self._by_slot()[ranks:]:
            who.is_leaving = True
            if who.state in OUTSIDE:
                actions.append(self._release(who))
        return actions + self._top_up() + self._fork_spares()

    def _top_up(self) -> list[Action]:
        """Start what is missing, as far as hosts have room."""
        if self.epoch < 0 or self._is_over:
            return []
        return [a for _ in range(self._missing()) for a in self._fill(self._free_slot())]

    def _missing(self) -> int:
        """Ranks that are neither there nor on their way."""
        return self._target() - len(self._staying()) - self._due()

    def _is_short(self) -> bool:
        return self._missing() > 0

    def _target(self) -> int:
        """How many ranks there can be at present."""
        return self.hosts.target(self.policy.ranks)

    def _count_ranks(self) -> None:
        """Unless somebody has said how many, there are as many as the launchers were asked for."""
        if not self.is_scaled and self.hosts.known:
            self.policy = replace(self.policy, ranks=self.hosts.ranks())

    def _fork(
        self,
        slot: int,
        *,
        is_first: bool = False,
        is_spare: bool = False,
        host: int | None = None,
        prefer: int | None = None,
    ) -> list[Action]:
        """Start a member; nothing if no host has room for it, or nobody is replaced."""
        if not is_first and not self.policy.replaces:
            return []
        if host is None and is_spare:
            host = self.hosts.emptiest(who.host for who in self.members.values())
        elif host is None:
            taken = (who.host for who in self._staying())
            host = self.hosts.pick(self.policy.ranks, taken, prefer)
        if host is None:
            return []
        member, self.next_id = self.next_id, self.next_id + 1
        self._slots.setdefault(slot, Slot())
        self.members[member] = Member(member, slot, is_spare=is_spare, host=host)
        return [Fork(member, slot, is_first, host, self._attempt, self.policy.ranks)]

    def _fill(self, slot: int, prefer: int | None = None) -> list[Action]:
        """Have one more rank: a spare, or else a new process."""
        spares = [w for w in self.members.values() if w.is_spare and not w.is_leaving]
        if not spares:
            return self._fork(slot, prefer=prefer)
        nearest = max(
            spares, key=lambda who: (who.state is MemberState.WAITING, who.host == prefer)
        )
        nearest.is_spare = False
        return self._fork_spares()

    def _fork_spares(self) -> list[Action]:
        """Have as many spares as there are to be, once the job has begun."""
        if self.epoch < 0 or self._is_over:
            return []
        waiting = [who for who in self.members.values() if who.is_spare and not who.is_leaving]
        due = [
            slot for slot in self._slots.values() if slot.fork_at_s is not None and slot.is_spare
        ]
        missing = self.policy.spares - len(waiting) - len(due)
        return [
            each for _ in range(missing) for each in self._fork(self._free_slot(), is_spare=True)
        ]

    def _free_slot(self) -> int:
        taken = {who.slot for who in self.members.values()}
        taken |= {number for number, slot in self._slots.items() if slot.fork_at_s is not None}
        return next(number for number in itertools.count() if number not in taken)

    def _by_slot(self) -> list[Member]:
        """Those that are to train in the next epoch, as far as they are known."""
        return sorted(self._staying(), key=lambda who: (who.slot, who.id))

    def _staying(self) -> list[Member]:
        return [who for who in self.members.values() if not who.is_spare and not who.is_leaving]

    def _due(self) -> int:
        """Replacements that are not forked yet, without spares."""
        slots = self._slots.values()
        return sum(slot.fork_at_s is not None and not slot.is_spare for slot in slots)

    def _minimum(self) -> int:
        return min(self.policy.minimum, self.policy.ranks)

    def _may_leave(self) -> bool:
        """Whether enough would be left; else those that leave train on until others have come."""
        staying = self._staying()
        there = sum(who.state is not MemberState.STARTING for who in staying)
        return there >= self._minimum() or there == len(staying) + self._due()

    def _are_replaced(self) -> bool:
        """Whether anybody can come for those that die or leave."""
        return self.policy.replaces and bool(self.hosts.known)

    def _release(self, who: Member) -> Action:
        """Forget a member; its exit is not heard any more. One that is on its way is killed."""
        del self.members[who.id]
        is_there = who.state is not MemberState.STARTING
        return Release(who.id) if is_there else Kill(who.id, "it is not needed any more")

    def inside(self) -> list[Member]:
        """Those that are in the epoch, or have left it and wait for the next."""
        return [who for who in self.members.values() if who.state in INSIDE]

    def _tell_to_leave(self, why: str, after: int = -1) -> list[Action]:
        """Those that have not left the epoch yet; who is done may have to give its state."""
        inside = [who for who in self.inside() if who.state is not MemberState.READY]
        for who in inside:
            who.state = MemberState.TRAINING
        return [End(who.id, why, after) for who in inside]

    def _try_start(self) -> list[Action]:
        """Start the members that begin together, if enough hosts are there."""
        up = len(self.hosts.up())
        is_late = self.now_s >= self._gather_from_s + self.policy.gather_s
        if self.is_started or self._is_over or up < self.policy.hosts:
            return []
        if up < self.policy.max_hosts and not is_late:
            return []
        self.is_started, self._attempt = True, self.next_id
        where = [host.number for host in self.hosts.up() for _ in range(host.ranks)]
        self.policy = replace(self.policy, ranks=len(where))
        return [
            each
            for slot, host in enumerate(where)
            for each in self._fork(slot, is_first=not self.policy.begins_alone, host=host)
        ]

    def _start_again(self, why: str) -> list[Action]:
        kills: list[Action] = [Kill(other, why) for other in self.members]
        self.members.clear()
        self.is_started, self._gather_from_s = False, self.now_s
        return [*kills, *self._try_start()]

    def _fail(self, why: str) -> list[Action]:
        self._is_over = True
        return [Fail(why)]
