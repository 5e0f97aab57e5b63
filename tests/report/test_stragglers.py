"""Who made the others wait, in which phase, how regularly: against jobs whose truth is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.report.analysis import Analysis, analyse
from paceline.report.phases import PHASES, Phase
from paceline.report.steps import share_blame
from paceline.report.stragglers import Pattern, find_pattern
from tests.examples import examples
from tests.report.histories import Delay, Job, make_run

DELAYED = (Phase.INPUT, Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.OPTIMIZER)


def analysis_of(job: Job) -> Analysis:
    return analyse(make_run(job)).analysis


@pytest.mark.parametrize("phase", DELAYED, ids=lambda phase: phase.value)
@pytest.mark.parametrize("rank", [0, 2])
def test_a_delay_is_blamed_on_its_rank_and_phase(rank: int, phase: Phase) -> None:
    """200 ms in one rank: wall times are the same everywhere, and so is waiting on all others."""
    found = analysis_of(Job(delays=(Delay(rank, phase, 200.0),)))
    culprit = found.culprit
    assert culprit is not None
    assert (culprit.straggler.rank, culprit.straggler.phase) == (rank, phase)
    # Each of the others waits 200 ms in every step, and for nobody else.
    assert culprit.straggler.per_step_ms == pytest.approx(200.0, abs=0.01)
    assert culprit.straggler.by_phase_ms[phase] == pytest.approx(culprit.straggler.lost_ms)
    assert culprit.straggler.last_share == 1.0
    assert culprit.straggler.pattern is Pattern.CHRONIC
    assert [each.straggler.lost_ms for each in found.suspects[1:]] == [0.0, 0.0, 0.0]


def test_the_share_is_of_the_others_time() -> None:
    found = analysis_of(Job(delays=(Delay(1, Phase.BACKWARD, 200.0),)))
    assert found.culprit is not None
    # 200 ms of a step of 8.1 + 4 + 20 + 1 + 240 + 2 (the last bucket).
    assert found.culprit.straggler.share == pytest.approx(200 / 275.1, abs=1e-4)
    assert found.lost_share == pytest.approx(3 / 4 * 200 / 275.1, abs=1e-4)


def test_two_slow_ranks_share_the_blame() -> None:
    delays = (Delay(1, Phase.FORWARD, 100.0), Delay(3, Phase.BACKWARD, 100.0))
    found = analysis_of(Job(delays=delays))
    first, second, *others = (each.straggler for each in found.suspects)
    assert {(first.rank, first.phase), (second.rank, second.phase)} == {
        (1, Phase.FORWARD),
        (3, Phase.BACKWARD),
    }
    assert first.lost_ms == pytest.approx(second.lost_ms)
    assert first.is_significant
    assert second.is_significant
    assert all(other.lost_ms == 0 for other in others)


def test_the_slower_of_two_slow_ranks_pays_for_the_difference_alone() -> None:
    delays = (Delay(1, Phase.FORWARD, 100.0), Delay(3, Phase.FORWARD, 150.0))
    found = analysis_of(Job(steps=11, delays=delays))
    lost = {each.straggler.rank: each.straggler.lost_ms for each in found.suspects}
    # 100 ms: two wait for two. 50 ms more: three wait for one. Ten steps have one before them.
    assert lost[1] == pytest.approx(10 * 100 * 2 / 2)
    assert lost[3] == pytest.approx(10 * (100 * 2 / 2 + 50 * 3))


def test_two_ranks() -> None:
    found = analysis_of(Job(ranks=2, delays=(Delay(0, Phase.INPUT, 30.0),)))
    assert found.culprit is not None
    assert found.culprit.straggler.rank == 0
    assert found.culprit.straggler.per_step_ms == pytest.approx(30.0)


def test_one_rank_waits_for_nobody() -> None:
    found = analysis_of(Job(ranks=1))
    assert found.culprit is None
    assert found.lost_share == 0


def test_noise_has_no_culprit() -> None:
    found = analysis_of(Job(steps=400, jitter=0.2))
    assert found.lost_share > 0.05
    assert found.culprit is None


def test_a_culprit_stands_out_of_noise() -> None:
    job = Job(steps=300, jitter=0.2, delays=(Delay(2, Phase.FORWARD, 25.0),))
    culprit = analysis_of(job).culprit
    assert culprit is not None
    assert (culprit.straggler.rank, culprit.straggler.phase) == (2, Phase.FORWARD)


def test_one_stall() -> None:
    delay = Delay(3, Phase.INPUT, 5000.0, steps=lambda step: step == 77)
    found = analysis_of(Job(steps=200, jitter=0.02, delays=(delay,)))
    straggler = next(each.straggler for each in found.suspects if each.straggler.rank == 3)
    assert straggler.pattern is Pattern.ONE_OFF
    assert (straggler.from_step, straggler.phase) == (77, Phase.INPUT)
    assert [(stall.rank, stall.step, stall.phase) for stall in found.stalls] == [
        (3, 77, Phase.INPUT)
    ]
    assert found.stalls[0].late_ms == pytest.approx(5000, rel=0.01)


def test_a_checkpoint_every_25_steps() -> None:
    delay = Delay(0, Phase.INPUT, 700.0, steps=lambda step: step % 25 == 0)
    found = analysis_of(Job(steps=200, jitter=0.02, delays=(delay,)))
    assert found.culprit is not None
    assert found.culprit.straggler.pattern is Pattern.PERIODIC
    assert found.culprit.straggler.period_steps == 25


def test_a_periodic_stall_beside_a_chronic_straggler_is_named_too() -> None:
    delays = (
        Delay(2, Phase.BACKWARD, 60.0),
        Delay(0, Phase.INPUT, 700.0, steps=lambda step: step % 25 == 0),
    )
    found = analysis_of(Job(steps=200, jitter=0.02, delays=delays))
    named = [each.straggler for each in found.suspects if each.straggler.is_significant]
    assert [(each.rank, each.pattern) for each in named] == [
        (2, Pattern.CHRONIC),
        (0, Pattern.PERIODIC),
    ]


def test_slow_from_the_middle_on() -> None:
    delay = Delay(1, Phase.BACKWARD, 100.0, steps=lambda step: step > 150)
    found = analysis_of(Job(steps=200, delays=(delay,)))
    assert found.culprit is not None
    assert found.culprit.straggler.pattern is Pattern.CHRONIC
    assert (found.culprit.straggler.from_step, found.culprit.straggler.to_step) == (151, 200)


@pytest.mark.parametrize(
    ("blames", "pattern"),
    [
        ([0.0] * 50, Pattern.NEVER),
        ([1.0] * 50, Pattern.CHRONIC),
        ([0.0] * 30 + [9.0] + [0.0] * 30, Pattern.ONE_OFF),
        ([9.0 if at in (3, 17, 20, 71, 88) else 0.0 for at in range(200)], Pattern.OCCASIONAL),
        ([9.0 if at % 40 == 7 else 0.1 for at in range(400)], Pattern.PERIODIC),
    ],
)
def test_patterns(blames: list[float], pattern: Pattern) -> None:
    assert find_pattern(range(1, len(blames) + 1), blames)[0] is pattern


@pytest.mark.parametrize("phase", [Phase.INPUT, Phase.OPTIMIZER], ids=lambda phase: phase.value)
def test_a_forward_that_waits_for_rank_0(phase: Phase) -> None:
    """Buffers come from rank 0 at the begin of a forward: the others' forwards get long."""
    job = Job(jitter=0.02, delays=(Delay(0, phase, 60.0),), forward_waits_for=0)
    found = analysis_of(job)
    assert found.culprit is not None
    assert (found.culprit.straggler.rank, found.culprit.straggler.phase) == (0, phase)
    assert found.culprit.straggler.per_step_ms == pytest.approx(60.0, rel=0.1)
    usual = found.ranks[2].own[Phase.FORWARD]
    assert usual == pytest.approx(job.usual_ms[Phase.FORWARD], rel=0.1)


def test_another_rank_is_blamed_as_ever_if_forwards_wait_for_rank_0() -> None:
    job = Job(jitter=0.02, delays=(Delay(2, Phase.INPUT, 60.0),), forward_waits_for=0)
    culprit = analysis_of(job).culprit
    assert culprit is not None
    assert (culprit.straggler.rank, culprit.straggler.phase) == (2, Phase.INPUT)


phases = st.sampled_from(DELAYED)
delays = st.builds(
    lambda rank, phase, ms, every: Delay(rank, phase, ms, steps=lambda step: step % every == 0),
    st.integers(0, 2),
    phases,
    st.floats(0, 300),
    st.integers(1, 3),
)
jobs = st.builds(
    lambda delays, jitter, seed: Job(
        ranks=3, steps=8, delays=tuple(delays), jitter=jitter, seed=seed
    ),
    st.lists(delays, max_size=4),
    st.floats(0, 0.5),
    st.integers(0, 99),
)


@settings(max_examples=examples(60))
@given(jobs)
def test_all_that_is_lost_is_blamed_once(job: Job) -> None:
    measured = analyse(make_run(job))
    for step in measured.steps:
        lost = sum(each.lost_ns for each in step.ranks.values())
        assert sum(each.blame_ns for each in step.ranks.values()) == pytest.approx(lost, abs=2)
        for each in step.ranks.values():
            assert min(each.blame_ns, each.late_ns, each.lost_ns, each.exposed_ns) >= 0
            assert sum(each.blame_by_phase_ns.values()) == pytest.approx(each.blame_ns, abs=2)
            # A rank's own time, its waiting and its communication are the whole step.
            whole = each.record.reduced_ns - min(
                other.before.reduced_ns for other in step.ranks.values()
            )
            assert sum(each.own_ns.values()) + each.lost_ns + each.exposed_ns == whole


@settings(max_examples=examples(30))
@given(jobs, st.permutations(range(3)))
def test_ranks_have_no_privileges(job: Job, order: list[int]) -> None:
    """The same job with other rank numbers has the same result, with other rank numbers."""
    run = make_run(job)
    renamed = tuple(
        sorted(
            (
                replace(history, info=replace(history.info, rank=order[history.info.rank]))
                for history in run.histories
            ),
            key=lambda history: history.info.rank,
        )
    )
    plain, other = analyse(run).analysis, analyse(replace(run, histories=renamed)).analysis
    lost = {order[each.straggler.rank]: each.straggler for each in plain.suspects}
    for each in other.suspects:
        assert each.straggler.lost_ms == pytest.approx(lost[each.straggler.rank].lost_ms, abs=0.01)
        for phase in PHASES:
            expected = lost[each.straggler.rank].by_phase_ms[phase]
            assert each.straggler.by_phase_ms[phase] == pytest.approx(expected, abs=0.01)


@given(st.lists(st.integers(0, 10**9), min_size=2, max_size=8))
def test_blame_is_the_waiting_of_all(stamps: list[int]) -> None:
    arrived = dict(enumerate(stamps))
    lost = {rank: max(stamps) - stamp for rank, stamp in arrived.items()}
    blame = share_blame(arrived, lost)
    assert sum(blame.values()) == pytest.approx(sum(lost.values()))
    assert min(blame.values()) == 0
    assert all(blame[rank] > 0 for rank in arrived if arrived[rank] == max(stamps) > min(stamps))
