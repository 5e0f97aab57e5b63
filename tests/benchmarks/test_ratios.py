from __future__ import annotations

import pytest

from benchmarks.interleave import Cost, mean_over_ranks
from benchmarks.ratios import bootstrap_interval, p50, ratio


def test_p50_is_over_all_steps() -> None:
    assert p50([[1.0, 2.0], [3.0, 4.0], [100.0]]) == 3.0


def test_a_slow_round_disturbs_both_sides_alike() -> None:
    quiet, disturbed = [10.0, 10.0], [70.0, 70.0]
    measured = ratio([[11.0], [77.0], [11.0]], [quiet, disturbed, quiet])
    assert measured.value == pytest.approx(1.1)
    assert measured.low == measured.high == pytest.approx(1.1)


def test_the_interval_holds_the_median_and_narrows_with_more_rounds() -> None:
    values = [1.0, 1.1, 1.2, 1.3, 1.4]
    low, high = bootstrap_interval(values)
    assert 1.0 <= low <= 1.2 <= high <= 1.4
    narrower = bootstrap_interval(values * 20)
    assert narrower[1] - narrower[0] < high - low


def test_ranks_are_averaged_step_by_step() -> None:
    first = {"a": [[Cost(1.0, 10.0), Cost(2.0, 20.0)]]}
    second = {"a": [[Cost(3.0, 30.0), Cost(4.0, 40.0)]]}
    assert mean_over_ranks([first, second]) == {"a": [[Cost(2.0, 20.0), Cost(3.0, 30.0)]]}
