"""Every pair of features together, on ranks and in one process: the same numbers, or an error.

``FEATURES`` (pair_cases.py) are what a training can have. Cases are chosen so that every pair of
values is in one that trains; the pairs of ``REFUSED`` are run by themselves, and raise what is
written there on every rank. What was seen is counted from the cases that really ran:
``pytest -s tests/ddp/parity/test_pairs.py`` prints the table. A failure prints its case: call
``replay({...})``.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from paceline.errors import ConfigurationError, DesynchronizedError, SharedParametersError
from paceline.testing import run_ranks
from tests.ddp.parity.covering import Case, all_pairs, cover_pairs, draw_case, pairs_of, table
from tests.ddp.parity.pair_cases import FEATURES, run_cases, train_cases

DELAYED = ("delayed", True)
MIXED = ("precision", "mixed")
JOIN = ("join", True)
REFUSED = {
    frozenset((DELAYED, ("weighted", True))): ConfigurationError,
    frozenset((DELAYED, ("nonfinite", "skip"))): ConfigurationError,
    frozenset((DELAYED, MIXED)): ConfigurationError,
    frozenset((DELAYED, JOIN)): ConfigurationError,
    frozenset((MIXED, ("wrappers", "nested"))): SharedParametersError,
    frozenset((MIXED, ("wrappers", "siblings"))): SharedParametersError,
    frozenset((JOIN, ("wrappers", "nested"))): ConfigurationError,
    frozenset((JOIN, ("wrappers", "siblings"))): DesynchronizedError,
}
USUAL = {name: values[0] for name, values in FEATURES.items()}


def is_allowed(case: Case) -> bool:
    return not any(refused <= case.items() for refused in REFUSED)


def train(world: int, cases: Sequence[Case], timeout_s: float = 120) -> list[Case]:
    """Run cases; return them if all were right on all ranks."""
    run_ranks(world, train_cases, cases, timeout_s=timeout_s)
    return list(cases)


def replay(case: dict[str, Any], world: int = 2) -> None:
    """Run one printed case again."""
    train(world, [USUAL | case])


def assert_all_seen(seen: Sequence[Case]) -> None:
    print("\n" + table(FEATURES, seen, REFUSED))
    found = {pair for case in seen for pair in pairs_of(case)}
    expected = {pair for pair in all_pairs(FEATURES) if frozenset(pair) not in REFUSED}
    assert found == expected, f"never together: {sorted(expected - found, key=repr)}"


@pytest.mark.timeout(240)
def test_every_pair_on_two_ranks() -> None:
    assert_all_seen(train(2, cover_pairs(FEATURES, is_allowed)))


def test_refused_pairs_raise_on_every_rank() -> None:
    cases = [USUAL | dict(pair) for pair in REFUSED]
    outcomes = run_ranks(2, run_cases, cases, timeout_s=120)
    for expected, case, raised in zip(
        REFUSED.values(), cases, zip(*outcomes, strict=True), strict=True
    ):
        assert [type(error) for error in raised] == [expected, expected], f"{case}: {raised}"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [2, 3])
def test_every_pair_many_times(world: int) -> None:
    draw = random.Random(world)
    cases = cover_pairs(FEATURES, is_allowed, seed=world)
    cases += [draw_case(FEATURES, is_allowed, draw) for _ in range(400 // world)]
    assert_all_seen(train(world, cases, timeout_s=500))
