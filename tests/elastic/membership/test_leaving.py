"""Ranks that are told to leave, jobs that are told to end: who waits for whom, and who saves."""

from __future__ import annotations

import pytest

from paceline.elastic.members import Fork, Release
from tests.elastic.membership.simulated_job import make_job


def test_who_is_told_to_end_leaves_after_its_step_and_is_not_replaced() -> None:
    job = make_job(3)
    job.settle()
    job.step(7)
    job.preempt(1)
    assert job.ranks[1].is_told
    job.settle()
    assert sorted(job.training()) == [0, 2]
    assert job.released == {1}


def test_who_leaves_is_replaced_if_too_few_would_be_left() -> None:
    job = make_job(2, minimum=2)
    job.settle()
    job.preempt(1)
    job.settle()
    assert len(job.training()) == 2
    assert job.released == {1}


def test_who_leaves_trains_on_until_enough_others_have_come() -> None:
    """Nobody waits for the replacements."""
    job = make_job(3, minimum=3)
    job.settle()
    for member in (1, 2):
        job.preempt(member)
    first, second = (member for member in job.ranks if job.ranks[member].place is None)
    for number, member in enumerate((first, second)):
        assert not any(rank.is_told for rank in job.ranks.values())
        job.step(2)
        assert job.committed == 1 + number
        job.join(member)
    assert all(job.ranks[member].is_told for member in range(3))
    job.settle()
    assert sorted(job.training()) == [0, first, second]
    assert job.released == {1, 2}


def test_who_leaves_and_dies_before_its_replacement_has_come() -> None:
    job = make_job(2, minimum=2)
    job.settle()
    job.preempt(1)
    new = next(member for member in job.ranks if job.ranks[member].place is None)
    job.die(1)
    job.settle()
    assert sorted(job.training()) == [0, new]


def test_without_replacements_the_last_that_leave_name_one_that_saves() -> None:
    job = make_job(3, replaces=False)
    job.settle()
    actions = [a for m in list(job.ranks) for a in job.membership.on_leave(m)]
    assert not any(isinstance(a, Fork) for a in actions)
    job.do(actions)
    ahead, *behind = job.ranks
    job.membership.on_ready(ahead, 8, True)
    released = [a for m in behind for a in job.membership.on_ready(m, 7, True)]
    assert {a.member: a.saves for a in released if isinstance(a, Release)} == {
        ahead: True, **dict.fromkeys(behind, False)}  # fmt: skip
    assert job.membership.is_finished


@pytest.mark.parametrize("spares", [0, 1])
def test_when_the_job_is_told_to_end_all_leave_and_one_saves(spares: int) -> None:
    job = make_job(3, minimum=2, hold_s=1000.0, spares=spares)
    job.settle()
    job.step(0)  # member 0 has committed it
    job.die(2)
    job.do(job.membership.on_host_leaving(None))
    assert [m for m, rank in job.ranks.items() if rank.place is None] == []
    actions = [a for m in (1, 0) for a in job.membership.on_ready(m, job.ranks[m].step, True)]
    assert job.membership.is_finished
    assert [a for a in actions if isinstance(a, Release)] == [Release(0, saves=True), Release(1)]
    assert job.membership.now_s == 0.0


def test_a_job_that_is_told_to_end_before_its_first_step() -> None:
    job = make_job(2)
    job.do(job.membership.on_host_leaving(None))
    assert job.failed == "the job was told to end"
