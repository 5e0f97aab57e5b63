"""How a job ends: some ranks return from ``train(state)``, others are told to leave."""

from __future__ import annotations

from tests.elastic.membership.simulated_job import make_job


def test_the_end() -> None:
    job = make_job(3)
    job.settle()
    for member in list(job.ranks):
        assert not job.membership.is_finished
        job.do(job.membership.on_done(member, 7))
    assert job.membership.is_finished
    assert len(job.released) == 3


def test_one_that_is_done_gives_its_state_to_those_that_are_not() -> None:
    job = make_job(3)
    job.settle()
    job.step(0)  # member 0 has committed the last step
    job.do(job.membership.on_done(0, job.ranks[0].step))
    job.die(2)
    assert job.ranks[0].is_told
    job.leave(0)
    job.leave(1)
    assert job.membership.epoch == 1


def test_one_that_is_done_gets_no_place_before_it_has_left_its_epoch() -> None:
    """It would miss it: it waits for the end of the job."""
    job = make_job(3)
    job.settle()
    job.step(0)
    job.done(0)
    job.die(2)
    job.leave(1)
    assert job.membership.epoch == 0
    job.leave(0)
    assert job.membership.epoch == 1


def test_all_return_after_they_were_asked_to_leave_after_a_step() -> None:
    """None of them takes another step, so none sees that it was asked: the job is over."""
    job = make_job(3)
    job.settle()
    job.do(job.membership.on_scale(2))
    for member in job.training():
        job.done(member)
    assert job.membership.is_finished
    assert job.membership.epoch == 0


def test_one_returns_and_another_leaves_after_the_same_step() -> None:
    job = make_job(3)
    job.settle()
    job.do(job.membership.on_scale(2))
    job.step(7)
    job.done(0)
    job.leave(1)
    assert job.ranks[0].is_freed
    job.settle()
    assert job.membership.epoch == 1
    job.finish()


def test_who_is_not_wanted_any_more_and_has_copied_nothing_is_let_go() -> None:
    job = make_job(3, hold_s=100.0)
    job.settle()
    job.die(2)
    for member in job.training():
        job.leave(member)
    joiner = next(m for m, r in job.ranks.items() if r.place is None)
    job.join(joiner)
    assert job.ranks[joiner].is_copying
    job.do(job.membership.on_scale(1))
    job.die(1)
    job.settle()
    assert job.released == {joiner}
    assert job.membership.epoch == 2
    assert len(job.ranks) == 1
