"""The coordinator dies at any moment, and a new one takes over from what launchers report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.elastic.handshake import connect
from paceline.elastic.hosts.takeover import (
    HostReport,
    MemberReport,
    is_complete,
    put_together,
)
from paceline.elastic.members import ElasticPolicy, Fail, MemberState
from paceline.elastic.membership import Membership
from paceline.elastic.protocol import send
from tests.elastic.membership.simulated_job import Job, Rank
from tests.elastic.test_coordinator import KEY, Running, hear, say_hello
from tests.examples import examples


def report_of(job: Job) -> HostReport:
    """What a launcher knows of its ranks, without asking the coordinator."""
    members = [member_report(member, rank) for member, rank in job.ranks.items()]
    places = [rank.place for rank in job.ranks.values() if rank.place is not None]
    latest = max(places, key=lambda place: place.epoch, default=None)
    return HostReport(
        latest.epoch if latest else -1,
        latest.world if latest else len(members),
        [0],
        max(job.ranks, default=0) + 100,
        members=members,
    )


def member_report(member: int, rank: Rank) -> MemberReport:
    if rank.place is None:
        state = MemberState.WAITING if rank.is_left else MemberState.STARTING
        return MemberReport(member, rank.slot, state.value)
    state = MemberState.DONE if rank.is_done else MemberState.TRAINING
    state = MemberState.READY if rank.is_left else state
    return MemberReport(member, rank.slot, state.value, rank.step, epoch=rank.place.epoch)


def take_over(job: Job, scale_before: int = 0) -> None:
    """Another coordinator, which knows nothing but the report; somebody may be faster."""
    old, reports = job.membership, {0: report_of(job)}
    assert is_complete(reports)
    policy = replace(old.policy, ranks=0)
    job.membership = Membership(policy, now_s=old.now_s)
    job.membership.next_id = reports[0].next_id
    job.membership.hosts.put(0, old.policy.ranks)
    if scale_before:
        assert job.membership.on_scale(scale_before) == []
    found = put_together(reports)
    if old.is_scaled:
        found = replace(found, scaled_to=old.policy.ranks)
    actions = job.membership.resume(found)
    if found.is_whole:
        assert not [a for a in actions if isinstance(a, Fail)]
    job.do(actions)


IN_STEP = ("die_in_step", "lose_link")
PLAIN = ("die", "join", "leave", "catch_up")
EVENTS = st.lists(
    st.tuples(
        st.sampled_from([*IN_STEP, *PLAIN, "done", "step", "scale", "tick", "take over"]),
        st.integers(0, 7),
    ),
    max_size=60,
)


def happen(job: Job, what: str, number: int) -> None:
    members = sorted(job.ranks)
    if what == "step":
        job.step(number)
    elif what == "scale":
        job.do(job.membership.on_scale(1 + number % 4))
    elif what == "tick":
        job.do(job.membership.on_tick(job.membership.now_s + number))
    elif what == "take over":
        take_over(job)
    else:
        getattr(job, what)(members[number % len(members)])


@settings(max_examples=examples(300))
@given(st.integers(1, 4), st.integers(0, 1), EVENTS)
def test_no_committed_step_is_lost(ranks: int, spares: int, events: list[tuple[str, int]]) -> None:
    job = Job(Membership(ElasticPolicy(ranks, early_deaths=1000, spares=spares)))
    job.do(job.membership.start())
    job.settle()
    for what, number in events:
        if job.failed or job.membership.is_finished or not job.ranks:
            break
        happen(job, what, number)
    if not job.failed:
        job.settle()
    if job.failed:
        assert "nobody holds the state" in job.failed
    elif job.last_step is not None:
        job.finish()
    elif job.ranks:
        assert len(job.training()) == job.membership.policy.ranks
        assert all(job.ranks[m].step == job.committed for m in job.training())


def make_job(ranks: int = 3) -> Job:
    job = Job(Membership(ElasticPolicy(ranks)))
    job.do(job.membership.start())
    job.settle()
    return job


def test_who_trains_does_not_hear_of_it() -> None:
    job = make_job()
    job.step(7)
    before = repr(job.ranks)
    take_over(job)
    assert repr(job.ranks) == before
    assert job.membership.epoch == 0


@pytest.mark.parametrize("ranks", [2, 4])
def test_asked_to_scale_before_launchers_have_reported(ranks: int) -> None:
    job = make_job()
    job.step(7)
    take_over(job, scale_before=ranks)
    job.settle()
    assert len(job.training()) == ranks


def test_a_death_while_nobody_was_there_ends_the_epoch() -> None:
    job = make_job()
    job.step(7)
    del job.ranks[1]
    take_over(job)
    job.settle()
    assert job.membership.epoch >= 1
    assert len(job.training()) == 3


@pytest.mark.parametrize("left", [1, 2])
def test_it_died_while_an_epoch_ended(left: int) -> None:
    job = make_job()
    job.die(2)
    for member in (0, 1)[:left]:
        job.leave(member)
    take_over(job)
    job.settle()
    assert len(job.training()) == 3


def test_it_died_while_it_told_ranks_to_begin() -> None:
    job = make_job()
    job.die(2)
    job.leave(0)
    place = job.ranks[1].place
    job.leave(1)
    job.ranks[1].place, job.ranks[1].is_left = place, True  # never heard of epoch 1
    take_over(job)
    job.settle()
    assert job.membership.epoch >= 2
    assert len(job.training()) == 3


def test_before_the_first_epoch_all_begin_again_unless_all_are_there() -> None:
    job = Job(Membership(ElasticPolicy(2)))
    job.do(job.membership.start())
    first = set(job.ranks)
    take_over(job)  # nobody knows for which attempt they were started
    assert not first & set(job.ranks)
    job.settle()
    assert len(job.training()) == 2


def test_all_that_began_together_are_kept() -> None:
    members = [MemberReport(n, n, MemberState.WAITING.value, attempt=4) for n in range(2)]
    report = HostReport(-1, 2, [0], 9, members=members)
    found = put_together({0: report})
    assert found.is_whole
    assert not put_together({0: replace(report, members=members[:1])}).is_whole


def test_reports_of_all_hosts_of_the_latest_epoch_are_waited_for() -> None:
    old, new = HostReport(3, 2, [0, 1]), HostReport(4, 2, [0, 2])
    assert not is_complete({0: old})
    assert is_complete({0: old, 1: old})
    assert not is_complete({0: old, 1: old, 3: new})
    assert is_complete({0: new, 2: new})


def test_a_report_travels_as_json() -> None:
    report = HostReport(1, 2, [0], 3, 4, ["why"], None, [MemberReport(1, 0)])
    assert HostReport.from_plain(report.to_plain()) == report
    with pytest.raises(TypeError):
        HostReport.from_plain({"members": [], "more": 1})


class TestTakingOver:
    """What a launcher says while others have not reported yet is not lost."""

    @pytest.fixture
    def running(self, tmp_path: Path) -> Iterator[Running]:
        made = Running(tmp_path)
        yield made
        made.close()

    def report(self, member: int) -> dict[str, Any]:
        place = MemberReport(member, member, MemberState.TRAINING.value, 5, epoch=3)
        return HostReport(3, 2, [0, 1], 9, members=[place]).to_plain()

    def test_a_death(self, running: Running) -> None:
        with connect(running.address, KEY) as one, connect(running.address, KEY) as other:
            assert say_hello(one, 0, "a", report=self.report(0))["keep"] == [0]
            send(one, "exited", member=0, why="rank 0 was killed", is_quiet=False, n=1)
            send(one, "alive", beat=1)
            assert hear(one, "granted")["heard"] == 1
            say_hello(other, 1, "b", report=self.report(1))
            said = hear(other, "say")
            assert (said["member"], said["message"]["kind"]) == (1, "end")
            assert said["message"]["why"] == "rank 0 was killed"
            assert hear(one, "fork")["slot"] == 0

    def test_what_a_rank_says(self, running: Running) -> None:
        """It was told to leave by the coordinator before: the others leave after the same step."""
        with connect(running.address, KEY) as one, connect(running.address, KEY) as other:
            say_hello(one, 0, "a", report=self.report(0))
            ready = {"kind": "ready", "step": 6, "is_clean": True}
            send(one, "from", member=0, message=ready, n=1)
            send(one, "alive", beat=1)
            hear(one, "granted")
            say_hello(other, 1, "b", report=self.report(1))
            said = hear(other, "say")
            assert (said["message"]["kind"], said["message"]["after"]) == ("end", 6)
            send(other, "from", member=1, message=ready, n=1)
            assert hear(one, "say")["message"]["kind"] == "begin"

    def test_a_launcher_that_was_started_again_reports_anew(self, running: Running) -> None:
        with connect(running.address, KEY) as one:
            say_hello(one, 0, "a", report=self.report(0))
            send(one, "exited", member=0, why="rank 0 was killed", is_quiet=False, n=1)
            send(one, "leaving", why="it got SIGTERM", n=2)
            send(one, "alive", beat=1)
            hear(one, "granted")
        running.coordinator._mailbox.post(lambda: running.coordinator._hosts.clear())
        with connect(running.address, KEY) as one, connect(running.address, KEY) as other:
            say_hello(one, 0, "c", report=self.report(0))
            say_hello(other, 1, "b", report=self.report(1))
            send(other, "alive", beat=1)
            hear(other, "granted")
            members = running.coordinator._membership.members.values()
            assert [who.state for who in members] == [MemberState.TRAINING] * 2
            assert not any(who.is_leaving for who in members)
