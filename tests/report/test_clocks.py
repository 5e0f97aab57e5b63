"""Clocks of several hosts, aligned by what reductions prove."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.report.analysis import analyse
from paceline.report.clocks import compare_clocks
from paceline.report.phases import Phase
from paceline.report.wording import warnings
from tests.examples import examples
from tests.report.histories import MS, Delay, Job, make_run, simulate

TWO = ("alpha", "beta")


def test_one_host_needs_no_alignment() -> None:
    (clock,) = compare_clocks(simulate(Job()))
    assert (clock.windows, clock.uncertainty_ns, clock.bound_ns) == ((), 0, 0)


@settings(max_examples=examples(25))
@given(st.floats(-1e6, 1e6), st.floats(-100, 100), st.integers(0, 9))
def test_the_offset_is_within_its_bounds(ahead_ms: float, drift_ppm: float, seed: int) -> None:
    job = Job(
        steps=40,
        jitter=0.1,
        seed=seed,
        hosts=TWO,
        clock_ms=(0.0, ahead_ms),
        drift_ppm=(0.0, drift_ppm),
    )
    _, clock = compare_clocks(simulate(job))
    true_ns = ahead_ms * MS
    drifted_ns = abs(drift_ppm) * 1e-6 * 40 * 80 * MS  # what the clock gains during the window
    assert clock.windows[0].lowest_ns - drifted_ns - 2 <= true_ns
    assert clock.windows[0].highest_ns + drifted_ns + 2 >= true_ns
    assert abs(clock.windows[0].ahead_ns - true_ns) <= drifted_ns + 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_culprit_on_either_host_is_named(rank: int) -> None:
    """Clocks ten minutes apart that drift by 50 ppm."""
    job = Job(
        steps=450,
        jitter=0.05,
        delays=(Delay(rank, Phase.BACKWARD, 40.0),),
        hosts=TWO,
        clock_ms=(0.0, 600_000.0),
        drift_ppm=(0.0, 50.0),
    )
    found = analyse(make_run(job)).analysis
    assert found.culprit is not None
    assert (found.culprit.straggler.rank, found.culprit.straggler.phase) == (rank, Phase.BACKWARD)
    assert found.culprit.straggler.per_step_ms == pytest.approx(40, rel=0.1)
    assert len(found.clocks[1].windows) == 5
    assert found.clocks[1].uncertainty_ns < 1 * MS


def test_uncertain_clocks_are_said_to_be() -> None:
    """Ends that differ by chance: a host that sees the end of a reduction late, now and then."""
    run = make_run(Job(steps=50, hosts=TWO, clock_ms=(0.0, 5.0), drift_ppm=(0.0, 20_000.0)))
    found = analyse(run).analysis
    assert any("The clock of beta is known to about" in text for text in warnings(found))
