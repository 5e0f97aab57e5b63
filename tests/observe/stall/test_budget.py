"""Budgets: what was long before may be long again; nobody waits, nobody stalls."""

from __future__ import annotations

import pytest

from paceline.observe.stall.budget import Budget, WaitKind
from paceline.observe.stall.start import read_stall_after


def test_floors_hold_while_nothing_is_known() -> None:
    budget = Budget()
    assert [budget.limit_s(each) for each in WaitKind] == [15.0, 60.0, 300.0]
    assert budget.shortest_s == 15.0


def test_what_was_asked_for_is_taken() -> None:
    budget = Budget(2.0)
    budget.learn(100.0)
    assert {budget.limit_s(each) for each in WaitKind} == {2.0}


def test_a_long_wait_that_ended_is_expected_again() -> None:
    budget = Budget()
    for _ in range(1000):
        budget.learn(0.01)
    budget.learn(40.0)  # rank 0 saved a checkpoint
    assert budget.limit_s(WaitKind.IN_STEP) == 80.0


def test_large_steps_have_large_budgets() -> None:
    budget = Budget()
    for _ in range(100):
        budget.learn(5.0)
    assert budget.limit_s(WaitKind.IN_STEP) == 100.0


@pytest.mark.parametrize(("text", "seconds"), [("", None), ("2.5", 2.5), ("0.1", 0.1)])
def test_stall_after(text: str, seconds: float | None) -> None:
    assert read_stall_after(text) == seconds


@pytest.mark.parametrize("text", ["soon", "-1", "0", "nan", "1e9"])
def test_what_is_no_time_is_said_and_ignored(text: str, caplog: pytest.LogCaptureFixture) -> None:
    assert read_stall_after(text) is None
    assert f"PACELINE_STALL_AFTER={text}" in caplog.text
