"""Leases: whatever is delayed, lost or stopped, ranks have stopped before the others go on.

Simulated with a clock that everybody reads with a rate of its own, and messages that take as long
as they like; see [Note: leases].
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.elastic.hosts.lease import HostLease, LeaseTable, now_s
from paceline.elastic.hosts.lease_file import LeaseReader, write_lease
from tests.examples import examples

LEASE_S = 8.0


@dataclass
class World:
    """Real time, a host with a clock of its own, and coordinators, one after the other."""

    host_rate: float
    time_s: float = 0.0
    lease: HostLease = field(default_factory=lambda: HostLease(LEASE_S))
    table: LeaseTable | None = field(default_factory=lambda: LeaseTable(LEASE_S, 0.0))
    is_known: bool = True  # to the coordinator that runs
    is_cut: bool = False
    beats: list[tuple[int, LeaseTable]] = field(default_factory=list)  # on their way
    answers: list[int] = field(default_factory=list)
    ranks_run: bool = True
    dropped: int = 0

    def __post_init__(self) -> None:
        assert self.table is not None
        self.table.heard(1, 0.0)

    def host_s(self) -> float:
        return 1000.0 + self.time_s * self.host_rate

    def host_looks(self) -> None:
        """The launcher, or a rank by the file, sees to it."""
        if self.lease.is_over(self.host_s()):
            self.ranks_run = False

    def beat(self) -> None:
        if self.table is not None:
            self.beats.append((self.lease.beat(self.host_s()), self.table))

    def deliver(self, number: int) -> None:
        """Some beat arrives, if the coordinator that it was sent to is there."""
        if self.beats and not self.is_cut:
            beat, table = self.beats.pop(number % len(self.beats))
            if table is self.table and self.is_known:
                table.heard(1, self.time_s)
                self.answers.append(beat)

    def answer(self, number: int) -> None:
        if self.answers and not self.is_cut:
            self.lease.answered(self.answers.pop(number % len(self.answers)))

    def coordinator_looks(self) -> None:
        """Every drop must find ranks that do not run, however late the host looked."""
        table = self.table
        if table is None:
            return
        is_unreported = not self.is_known and table.has_waited(self.time_s)
        if table.over(self.time_s) == [1] or is_unreported:
            assert not self.may_run(), "both parts go on"
            table.forget(1)
            self.dropped += 1
            self.is_known = False

    def may_run(self) -> bool:
        return self.ranks_run and not self.lease.is_over(self.host_s())

    def die(self) -> None:
        """The coordinator; and what was on its way to it or from it."""
        self.table, self.is_known = None, False
        self.answers.clear()
        self.lease.lost()

    def restart(self) -> None:
        if self.table is None:
            self.table = LeaseTable(LEASE_S, self.time_s)

    def reconnect(self) -> None:
        """To a coordinator that does not know this host yet; or nobody listens."""
        began_s = self.host_s()
        if self.is_cut:
            return
        if self.table is None:
            self.lease.refused(began_s)
        elif not self.is_known and not self.table.over(self.time_s):
            self.table.heard(1, self.time_s)
            self.is_known = True
            self.ranks_run = True  # reported, or started anew
            self.lease.until_s = None


NAMES = ["beat", "deliver", "answer", "look", "wait", "cut", "mend", "die", "restart", "reconnect"]
EVENTS = st.lists(
    st.tuples(st.sampled_from([*NAMES, "wait", "beat", "deliver"]), st.integers(0, 9)),
    max_size=120,
)


def happen(world: World, what: str, number: int) -> None:
    if what in ("deliver", "answer"):
        getattr(world, what)(number)
    elif what == "look":
        world.host_looks()
    elif what == "wait":
        world.time_s += number / 3
    elif what in ("cut", "mend"):
        world.is_cut = what == "cut"
    else:
        getattr(world, what)()


@settings(max_examples=examples(500))
@given(st.sampled_from([0.999, 1.0, 1.001]), EVENTS)
def test_two_parts_never_both_go_on(rate: float, events: list[tuple[str, int]]) -> None:
    world = World(rate)
    world.beat()
    world.deliver(0)
    world.answer(0)
    for what, number in events:
        happen(world, what, number)
        world.coordinator_looks()


def test_a_cut_host_is_dropped_and_a_lively_one_is_not() -> None:
    world = World(1.0)
    for _ in range(100):
        world.beat()
        world.deliver(0)
        world.answer(0)
        world.time_s += 1.0
        world.coordinator_looks()
    assert world.dropped == 0
    assert world.may_run()
    world.is_cut = True
    ran_s = 0.0
    while not world.dropped:
        world.beat()
        world.time_s += 0.25
        ran_s += 0.25 * world.may_run()
        world.coordinator_looks()
    assert LEASE_S / 4 < ran_s <= LEASE_S / 2


def test_ranks_go_on_as_long_as_the_coordinator_is_away() -> None:
    world = World(1.0)
    world.beat()
    world.deliver(0)
    world.answer(0)
    world.die()
    for _ in range(100):
        world.time_s += LEASE_S / 4
        world.reconnect()
        assert world.may_run()


def test_a_refusal_before_the_first_answer_is_no_lease() -> None:
    lease = HostLease(LEASE_S)
    lease.refused(5.0)
    assert lease.until_s is None
    assert not lease.is_over(1e9)


def test_an_answer_to_an_old_beat_does_not_shorten_anything() -> None:
    lease = HostLease(LEASE_S)
    first, second = lease.beat(1.0), lease.beat(2.0)
    lease.answered(second)
    lease.answered(first)
    assert lease.until_s == 2.0 + LEASE_S / 2


def test_for_how_long_nobody_answers() -> None:
    lease = HostLease(LEASE_S)
    assert lease.silent_s(3.0) == 0.0
    first = lease.beat(1.0)
    second = lease.beat(2.0)
    assert lease.silent_s(4.0) == 3.0
    lease.answered(first)
    assert lease.silent_s(4.0) == 2.0
    lease.answered(second)
    assert lease.silent_s(4.0) == 0.0


def test_a_launcher_that_stood_still_has_not_read_the_answer_yet() -> None:
    lease = HostLease(LEASE_S)
    lease.look(100.0)
    lease.answered(lease.beat(100.0))
    lease.beat(101.0)
    lease.look(101.0)
    lease.look(160.0)
    assert lease.silent_s(160.5) == 0.5
    for at_s in (161.0, 162.0, 163.0):  # now it runs, and nobody answers
        lease.look(at_s)
    assert lease.silent_s(163.0) == 3.0


def test_ranks_read_the_same_moment(tmp_path: Path) -> None:
    path = tmp_path / "lease"
    assert not LeaseReader(path).is_leased
    os.umask(os.umask(0))
    write_lease(path, now_s() + 100.0, LEASE_S)
    assert path.stat().st_mode & 0o777 == 0o600
    reader = LeaseReader(path)
    assert 100.0 <= reader.left_s() <= 100.0 + LEASE_S
    write_lease(path, now_s() - 10.0, LEASE_S)
    assert -10.0 <= reader.left_s() < 0.0
    reader.close()
