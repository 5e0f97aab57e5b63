"""A job without processes: carries out what a membership decides, and checks what must hold."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.elastic.members import (
    Action,
    Begin,
    ElasticPolicy,
    End,
    Fail,
    Fork,
    Kill,
    Regroup,
    Release,
)
from paceline.elastic.membership import Membership


@dataclass
class Rank:
    """A simulated member: what it has committed, and what it was told."""

    slot: int
    host: int = 0
    place: Begin | None = None
    step: int = 0
    is_told: bool = False
    is_left: bool = False
    must_commit: int = -1
    is_stuck: bool = False  # in a reduction of which a part will never come
    is_freed: bool = False  # it was told to leave that
    holds: bool = False  # a whole state, the one of its step
    is_copying: bool = False  # it waits for the state of its epoch's source
    is_done: bool = False  # train(state) has returned, and it waits for what becomes of the job


@dataclass
class Job:
    """Carries out actions on simulated members, and checks what must always hold."""

    membership: Membership
    ranks: dict[int, Rank] = field(default_factory=dict)
    failed: str = ""
    released: set[int] = field(default_factory=set)
    committed: int = 0
    preempted: int = 0
    is_settling: bool = False
    last_step: int | None = None  # with which train(state) returns, once that is known

    def do(self, actions: list[Action]) -> None:
        killed: list[int] = []
        if begins := [action for action in actions if isinstance(action, Begin)]:
            self._begin(begins)
        for action in actions:
            match action:
                case Fork():
                    assert action.member not in self.ranks
                    assert action.slot not in {rank.slot for rank in self.ranks.values()}
                    self.ranks[action.member] = Rank(action.slot, action.host)
                case Kill():
                    is_slow = "did not leave its step" in action.why
                    assert not (is_slow and self.is_settling), "it was never freed"
                    if self.ranks.pop(action.member, None) is not None:
                        killed.append(action.member)
                case End() | Regroup():
                    rank = self.ranks[action.member]
                    rank.is_told = True
                    rank.must_commit = getattr(action, "after", rank.must_commit)
                    rank.is_freed |= isinstance(action, End) and action.after <= rank.step
                case Release():
                    self.released.add(action.member)
                    self.ranks.pop(action.member)
                case Fail():
                    self.failed = action.why
        for member in killed:
            self.report_death(member)

    def _begin(self, begins: list[Begin]) -> None:
        world = len(begins)
        assert [b.rank for b in begins] == list(range(world))
        assert {(b.epoch, b.world, b.source, b.step) for b in begins} == {
            (begins[0].epoch, world, begins[0].source, begins[0].step)
        }
        assert begins[0].step == self.committed, "a committed step is lost, or invented"
        source = self.ranks[begins[begins[0].source].member]
        assert source.step == begins[0].step
        source.holds |= self.membership.epoch == 0
        assert source.holds
        for begin in begins:
            rank = self.ranks[begin.member]
            assert rank.is_left, "it has not left its epoch, and would miss this one"
            rank.holds |= begin.is_first
            is_behind = rank.step != begin.step or not rank.holds
            assert begin.copies or not is_behind
            rank.place, rank.is_copying = begin, is_behind
            rank.is_told = rank.is_left = rank.is_stuck = rank.is_freed = rank.is_done = False
            rank.must_commit = -1

    def training(self) -> list[int]:
        return [m for m, r in self.ranks.items() if r.place is not None and not r.is_left]

    def are_complete(self, inside: list[int]) -> bool:
        """Whether these are all ranks of the present epoch: then a collective can succeed."""
        places = [place for m in inside if (place := self.ranks[m].place) is not None]
        return bool(places) and len(places) == places[0].world

    def copy(self) -> None:
        """The ranks of the epoch copy the state of its source, if all are there."""
        inside = self.training()
        if not self.are_complete(inside):
            return
        for member in inside:
            rank = self.ranks[member]
            if rank.is_copying and rank.place is not None:
                rank.step, rank.holds, rank.is_copying = rank.place.step, True, False

    def step(self, who: int) -> None:
        """All that train reduce a step; only the first ``who`` of them get to commit it."""
        self.copy()
        inside = self.training()
        if not self.are_complete(inside) or self.committed == self.last_step:
            return
        if any(self.ranks[m].step != self.committed or self.ranks[m].is_copying for m in inside):
            return
        for member in inside[: 1 + who % len(inside)]:
            self.ranks[member].step += 1
        self.committed += 1

    def done(self, member: int) -> None:
        """``train(state)`` returns: this was the last step."""
        rank = self.ranks[member]
        is_there = rank.step == self.committed and not rank.is_copying and not rank.is_stuck
        is_last = self.last_step in (None, rank.step)
        if member in self.training() and is_there and is_last and not rank.is_done:
            self.last_step, rank.is_done = rank.step, True
            self.do(self.membership.on_done(member, rank.step))

    def finish(self) -> None:
        """Bring the job to its end."""
        for number in range(200):
            if self.failed or self.membership.is_finished:
                break
            for member in self.training():
                if member in self.ranks:
                    self.done(member)
            self.settle()
            self.step(number)
        assert self.failed or self.membership.is_finished, "it never ends"

    def catch_up(self, member: int) -> None:
        """A rank whose reductions were complete commits, too."""
        rank = self.ranks[member]
        is_able = not rank.is_left and not rank.is_stuck and not rank.is_copying
        if rank.step < self.committed and is_able:  # who has left has said where it is
            rank.step += 1

    def leave(self, member: int) -> None:
        rank = self.ranks[member]
        # Who waits in a collective, for a copy, or for the end of the job, does not look. The
        # others look when they commit.
        is_busy = rank.is_stuck or rank.is_copying or rank.is_done
        is_at_commit = rank.place is not None and rank.step > rank.place.step
        if (is_busy or not is_at_commit) and not rank.is_freed:
            return
        if rank.is_told and not rank.is_left and rank.place is not None:
            can_step = not rank.is_stuck and not rank.is_copying
            while can_step and rank.step < min(rank.must_commit, self.committed):
                rank.step += 1
            rank.is_left, rank.is_done = True, False
            step = rank.step if rank.holds else -1
            if not rank.holds:
                rank.place = None
            self.do(self.membership.on_ready(member, step, True))

    def cut_short(self) -> None:
        """Whoever has not committed the present step never will."""
        for member in self.training():
            self.ranks[member].is_stuck |= self.ranks[member].step < self.committed

    def die_in_step(self, member: int) -> None:
        """It dies before it has given the others all that they need for their step."""
        if member in self.training():
            self.cut_short()
        self.die(member)

    def lose_link(self, member: int) -> None:
        """A connection breaks in the middle of a step; who waits for it says so."""
        rank = self.ranks[member]
        if member in self.training() and rank.step < self.committed:
            rank.is_stuck = True
            self.do(self.membership.on_broken(member, "rank lost a connection"))

    def join(self, member: int) -> None:
        if self.ranks[member].place is None and not self.ranks[member].is_left:
            self.ranks[member].is_left = True
            self.do(self.membership.on_joined(member))

    def preempt(self, member: int) -> None:
        """Told to end: it asks to leave."""
        self.preempted += 1
        self.do(self.membership.on_leave(member))

    def die(self, member: int) -> None:
        self.ranks.pop(member)
        self.report_death(member)

    def report_death(self, member: int) -> None:
        self.count_again()
        self.do(self.membership.on_died(member, "test"))

    def count_again(self) -> None:
        """What only the dead had committed is done once more, from the same batch."""
        self.committed = max((r.step for r in self.ranks.values() if r.holds), default=0)

    def settle(self) -> None:
        """Everybody does what it was told, until nothing happens any more."""
        self.is_settling = True
        self._settle()
        self.is_settling = False

    def _settle(self) -> None:
        for _ in range(50):
            before = repr((self.ranks, self.membership.epoch))
            self.copy()
            for member in list(self.ranks):
                if member in self.ranks:
                    self.join(member)
                if member in self.ranks:
                    self.leave(member)
            for member in self.training():
                self.catch_up(member)
            if any(rank.is_told and not rank.is_left for rank in self.ranks.values()):
                self.step(7)
            if repr((self.ranks, self.membership.epoch)) != before:
                continue
            due_s = self.membership.next_due_s()
            if due_s is None:
                return
            self.do(self.membership.on_tick(due_s))


def make_job(ranks: int = 4, **policy: object) -> Job:
    job = Job(Membership(ElasticPolicy(ranks, **policy)))  # type: ignore[arg-type]
    job.do(job.membership.start())
    return job
