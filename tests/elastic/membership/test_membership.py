"""The coordinator's decisions, tried out on simulated members in random orders of events."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.elastic.members import (
    End,
    Kill,
)
from tests.elastic.membership.simulated_job import make_job
from tests.examples import examples

IN_STEP = ("die_in_step", "lose_link")
PLAIN = ("die", "join", "leave", "catch_up", "preempt")
EVENTS = st.lists(
    st.tuples(
        st.sampled_from([*IN_STEP, *PLAIN, "done", "step", "scale", "tick"]),
        st.integers(0, 7),
    ),
    max_size=60,
)


@settings(max_examples=examples(400))
@given(
    st.integers(1, 5),
    st.integers(1, 5),
    st.sampled_from([0.0, 5.0]),
    st.integers(0, 2),
    st.booleans(),
    EVENTS,
)
def test_no_committed_step_is_lost(
    ranks: int,
    minimum: int,
    hold_s: float,
    spares: int,
    begins_alone: bool,
    events: list[tuple[str, int]],
) -> None:
    options = {"hold_s": hold_s, "spares": spares, "begins_alone": begins_alone}
    options["minimum"] = least_ranks = min(minimum, ranks)
    job = make_job(ranks, early_deaths=1000, **options)
    job.settle()
    assert job.membership.epoch == 0
    members = sorted(job.ranks)
    for what, number in events:
        members = sorted(job.ranks)
        if job.failed or job.membership.is_finished or not members:
            break
        member = members[number % len(members)]
        if what == "step":
            job.step(number)
        elif what == "scale":
            job.do(job.membership.on_scale(max(least_ranks, 1 + number % 5)))
        elif what == "tick":
            job.do(job.membership.on_tick(job.membership.now_s + number))
        else:
            getattr(job, what)(member)
    if not job.failed:
        job.settle()
    if job.failed:
        assert "nobody holds the state" in job.failed
    elif job.last_step is not None:
        job.finish()
    elif members:
        wanted = job.membership.policy.ranks
        least = max(1, wanted - job.preempted)
        assert max(least, least_ranks) <= len(job.training()) <= wanted
        assert len(job.ranks) == len(job.training()) + spares
        assert all(job.ranks[m].step == job.committed for m in job.training())


def test_a_death_ends_the_epoch_and_the_survivors_go_on_at_once() -> None:
    job = make_job(3)
    job.settle()
    dead = next(m for m, r in job.ranks.items() if r.slot == 1)
    job.die(dead)
    for member in job.training():
        job.leave(member)
    assert job.membership.epoch == 1
    assert [job.ranks[m].place.rank for m in job.training()] == [0, 1]  # type: ignore[union-attr]


def test_hold_waits_for_the_replacement_which_gets_the_same_rank() -> None:
    job = make_job(3, hold_s=10.0)
    job.settle()
    dead = next(m for m, r in job.ranks.items() if r.slot == 1)
    job.die(dead)
    for member in job.training():
        job.leave(member)
    assert job.membership.epoch == 0
    new = next(m for m, r in job.ranks.items() if r.place is None)
    job.join(new)
    assert job.membership.epoch == 1
    assert job.ranks[new].place is not None
    assert job.ranks[new].place.rank == 1
    assert job.ranks[new].place.copies


def test_hold_ends() -> None:
    job = make_job(3, hold_s=10.0)
    job.settle()
    job.die(0)
    for member in job.training():
        job.leave(member)
    job.do(job.membership.on_tick(11.0))
    assert job.membership.epoch == 1
    assert len(job.training()) == 2


def test_a_death_before_the_first_epoch_starts_all_again() -> None:
    job = make_job(2)
    first = set(job.ranks)
    job.join(0)
    job.die(1)
    assert not first & set(job.ranks)
    job.settle()
    assert job.membership.epoch == 0


def test_who_begins_alone_is_replaced_alone_and_the_first_epoch_copies_a_state() -> None:
    job = make_job(2, begins_alone=True)
    job.join(0)
    job.die(1)
    assert [job.ranks[m].slot for m in sorted(job.ranks)] == [0, 1]
    assert 0 in job.ranks
    job.settle()
    places = [rank.place for rank in job.ranks.values()]
    assert job.membership.epoch == 0
    assert [place is not None and (place.copies, place.is_first) for place in places] == [
        (True, False)
    ] * 2


def test_who_dies_again_and_again_ends_the_job() -> None:
    job = make_job(2, early_deaths=4)
    job.settle()
    job.step(7)
    pauses = []
    while not job.failed:
        job.settle() if job.membership.next_due_s() is None else None
        new = next((m for m, r in job.ranks.items() if r.slot == 1), None)
        if new is None:
            due_s = job.membership.next_due_s()
            assert due_s is not None
            pauses.append(due_s - job.membership.now_s)
            job.do(job.membership.on_tick(due_s))
        else:
            job.die(new)
    assert "rank 1 died 4 times in a row" in job.failed
    assert pauses == sorted(pauses)
    assert pauses


def test_below_the_minimum_the_job_waits_and_then_ends() -> None:
    job = make_job(2, minimum=2, wait_s=60.0, early_deaths=1000)
    job.settle()
    job.die(1)
    job.leave(0)
    assert job.membership.epoch == 0
    job.do(job.membership.on_tick(61.0))
    assert "fewer than the minimum of 2" in job.failed


def test_who_does_not_leave_is_killed() -> None:
    job = make_job(3, respond_s=5.0)
    job.settle()
    job.die(2)
    job.leave(0)
    actions = job.membership.on_tick(5.5)
    assert [a.member for a in actions if isinstance(a, Kill)] == [1]


def test_all_at_once() -> None:
    job = make_job(2)
    job.settle()
    job.die(0)
    job.die(1)
    assert "nobody holds the state" in job.failed


@pytest.mark.parametrize("ranks", [1, 2, 6])
def test_scaling(ranks: int) -> None:
    job = make_job(3)
    job.settle()
    job.step(7)
    job.do(job.membership.on_scale(ranks))
    job.settle()
    assert len(job.training()) == ranks
    assert len(job.released) == max(0, 3 - ranks)


def test_a_step_that_can_be_neither_completed_nor_undone_ends_the_job() -> None:
    job = make_job(3)
    job.settle()
    job.die(2)
    job.do(job.membership.on_ready(0, 0, is_clean=False))
    job.do(job.membership.on_ready(1, 0, is_clean=False))
    assert "between optimizer.step() and state.commit() of step 1" in job.failed
    assert job.membership.epoch == 0


def test_a_spare_takes_the_place_of_the_dead_and_is_replaced() -> None:
    job = make_job(2, spares=1)
    job.settle()
    spare = next(m for m in job.ranks if m not in job.training())
    job.die(job.training()[1])
    assert len(job.ranks) == 3
    job.leave(job.training()[0])
    assert job.membership.epoch == 1
    assert spare in job.training()
    job.settle()
    assert len(job.training()) == 2
    assert len(job.ranks) == 3


@pytest.mark.parametrize("how", ["die", "lose_link"])
def test_a_death_while_others_complete_a_step_frees_them(how: str) -> None:
    """They were asked to leave after a step, and the first has; without it they cannot."""
    job = make_job(3)
    job.settle()
    job.do(job.membership.on_scale(2))
    job.step(0)
    job.leave(0)
    assert job.ranks[1].must_commit == 1
    job.cut_short()
    job.do(job.membership.on_tick(20.0))
    getattr(job, how)(2)
    assert job.ranks[1].is_freed
    assert job.membership.on_tick(40.0) == []  # it has as much time as after any death
    job.settle()
    assert [job.ranks[m].step for m in job.training()] == [1, 1]


def test_scaling_before_the_first_epoch_comes_after_it() -> None:
    job = make_job(2)
    job.do(job.membership.on_scale(3))
    job.settle()
    assert len(job.training()) == 3


def test_a_long_step_is_no_reason_to_kill_who_is_asked_to_leave_after_it() -> None:
    job = make_job(2, respond_s=5.0)
    job.settle()
    job.do(job.membership.on_scale(3))
    new = next(m for m, r in job.ranks.items() if r.place is None)
    job.join(new)
    assert job.ranks[0].is_told
    assert not [a for a in job.membership.on_tick(1000.0) if isinstance(a, Kill)]
    job.settle()
    assert len(job.training()) == 3


def test_who_always_dies_before_its_first_step_ends_the_job_although_others_go_on() -> None:
    job = make_job(2, early_deaths=4)
    job.settle()
    while not job.failed:
        job.die(next(m for m, r in job.ranks.items() if r.slot == 1))
        job.leave(0)
        before = job.committed
        job.step(0)
        assert job.failed or job.committed == before + 1
        job.settle()
    assert "rank 1 died 4 times in a row" in job.failed


def test_a_lost_connection_ends_the_epoch_and_nobody_is_killed() -> None:
    job = make_job(3)
    job.settle()
    actions = job.membership.on_broken(1, "rank 1 lost a connection")
    assert [type(action) for action in actions] == [End] * 3
    job.do(actions)
    assert job.membership.on_broken(2, "the same") == []
    job.settle()
    assert job.membership.epoch == 1
    assert len(job.training()) == 3


def test_a_connection_that_is_always_lost_ends_the_job() -> None:
    job = make_job(2, early_deaths=3)
    job.settle()
    for _ in range(3):
        job.do(job.membership.on_broken(0, "rank 0 lost a connection"))
        job.settle()
    assert job.failed == "rank 0 lost a connection; 3 times in a row without a step in between"


def test_who_has_not_copied_the_state_yet_holds_nothing() -> None:
    job = make_job(2, hold_s=100.0)
    job.settle()
    job.step(7)
    job.die(1)
    job.leave(0)
    joiner = next(m for m, r in job.ranks.items() if r.slot == 1)
    job.join(joiner)
    assert job.training() == [0, joiner]
    job.ranks.pop(0)
    job.do(job.membership.on_died(0, "rank 0 died"))
    job.do(job.membership.on_ready(joiner, -1, True))
    job.do(job.membership.on_tick(1000.0))
    assert "nobody holds the state any more" in job.failed


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(2, 5), EVENTS)
def test_without_replacements_nobody_is_started_and_no_step_is_lost(
    ranks: int, events: list[tuple[str, int]]
) -> None:
    job = make_job(ranks, replaces=False)
    job.settle()
    for what, number in events:
        members = sorted(job.ranks)
        if job.failed or job.membership.is_finished or not members:
            break
        member = members[number % len(members)]
        if what == "step":
            job.step(number)
        elif what in ("die", "leave", "catch_up", "preempt", "done"):
            getattr(job, what)(member)
    if not job.failed:
        job.settle()
    if not job.failed and job.last_step is not None:
        job.finish()
    assert max(job.ranks, default=0) < ranks
    assert not job.failed or "nobody holds the state" in job.failed
    assert all(job.ranks[m].step == job.committed for m in job.training())


def test_without_replacements_a_death_before_the_first_step_ends_the_job() -> None:
    job = make_job(2, replaces=False)
    job.die(0)
    assert "before the first step, and nobody replaces it" in job.failed
