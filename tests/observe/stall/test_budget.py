"""Budgets: what was long before may be long again; if no rank waits, they are large."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from paceline.observe.records import Activity, Status
from paceline.observe.stall.budget import Budget, WaitKind, ended_s
from paceline.observe.stall.patience import wait_kind
from paceline.observe.stall.start import read_stall_after
from paceline.observe.stall.views import RankView
from paceline.processes import ProcessState
from tests.observe.sample_records import INFO


def test_floors_hold_while_nothing_is_known() -> None:
    budget = Budget()
    assert [budget.limit_s(each) for each in WaitKind] == [15.0, 60.0, 300.0, 600.0]
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


def test_work_of_all_ranks_that_was_long_is_expected_again() -> None:
    budget = Budget()
    budget.learn_work(400.0)  # all have evaluated
    assert budget.limit_s(WaitKind.NOBODY_WAITS) == 800.0
    assert budget.limit_s(WaitKind.IN_STEP) == 15.0


def test_a_usual_wait_is_none_of_the_first_steps_and_no_checkpoint() -> None:
    budget = Budget()
    assert budget.usual_wait_s == 0.0
    budget.learn(100.0, is_usual=False)
    for wait_s in (0.3, 0.2, 40.0, 0.2, 0.4):
        budget.learn(wait_s)
    assert budget.usual_wait_s == 0.3


def recorded(waits_s: list[float], compute_s: float = 0.1) -> list[Status]:
    """What a rank recorded of steps: computed, then waited."""
    found, now_ns = [], 1
    for step, wait_s in enumerate(waits_s, 1):
        for activity, took_s in ((Activity.BACKWARD, compute_s), (Activity.WAITING, wait_s)):
            found.append(Status(activity, now_ns, step, now_ns))
            now_ns += round(took_s * 1e9)
    return [*found, Status(Activity.REDUCED, now_ns, len(waits_s), now_ns)]


def learned(statuses: list[Status]) -> Budget:
    budget = Budget()
    for last, now in itertools.pairwise(statuses):
        took_s = ended_s(last, now)
        if took_s is not None and last.activity is Activity.WAITING:
            budget.learn(took_s)
    return budget


def test_learned_from_recorded_steps() -> None:
    assert learned(recorded([1.0] * 200)).limit_s(WaitKind.IN_STEP) == 20.0
    assert learned(recorded([0.01] * 200)).limit_s(WaitKind.IN_STEP) == 15.0
    assert learned(recorded([0.01] * 200 + [40.0])).limit_s(WaitKind.IN_STEP) == 80.0
    assert learned(recorded([0.01] * 200, compute_s=100.0)).limit_s(WaitKind.IN_STEP) == 15.0


def test_a_wait_that_goes_on_or_ends_the_job_teaches_nothing() -> None:
    *before, waiting, _ = recorded([0.01] * 200 + [40.0])
    ended = Status(Activity.ENDED, waiting.since_ns + 40_000_000_000, 201, 1)
    for after in (waiting, ended):
        assert learned([*before, waiting, after]).limit_s(WaitKind.IN_STEP) == 15.0


def waiter(step: int) -> RankView:
    return RankView(0, None, Status(Activity.WAITING, 1, step, 1), ProcessState.ALIVE)


@pytest.mark.parametrize("step", [1, 3, 4, 100])
@pytest.mark.parametrize("activity", list(Activity))
@pytest.mark.parametrize("state", [ProcessState.STOPPED, ProcessState.DEAD])
def test_who_is_stopped_or_dead_is_not_waited_for(
    state: ProcessState, activity: Activity, step: int
) -> None:
    """Wherever it was: between steps, or in one of the first."""
    late = RankView(1, None, Status(activity, 1, step, 1), state)
    assert wait_kind([waiter(step), late], waiter(step).status) is WaitKind.IN_STEP


@pytest.mark.parametrize(
    ("activity", "step", "kind"),
    [
        (Activity.FORWARD, 4, WaitKind.IN_STEP),
        (Activity.INPUT, 4, WaitKind.BETWEEN_STEPS),
        (Activity.REDUCED, 4, WaitKind.BETWEEN_STEPS),
        (Activity.FORWARD, 3, WaitKind.FIRST_TIME),
        (Activity.INPUT, 1, WaitKind.FIRST_TIME),
    ],
)
def test_who_lives_is_waited_for(activity: Activity, step: int, kind: WaitKind) -> None:
    late = RankView(1, None, Status(activity, 1, step, 1), ProcessState.ALIVE)
    assert wait_kind([waiter(step), late], waiter(step).status) is kind


def test_what_a_rank_does_that_records_elsewhere_is_not_known() -> None:
    """On a host with a folder of its own: it may well evaluate."""
    one = replace(waiter(6), info=replace(INFO, rank=0, world=2))
    assert wait_kind([one], one.status) is WaitKind.BETWEEN_STEPS
    both = [one, replace(one, rank=1)]
    assert wait_kind(both, one.status) is WaitKind.IN_STEP


@pytest.mark.parametrize(("text", "seconds"), [("", None), ("2.5", 2.5), ("0.1", 0.1)])
def test_stall_after(text: str, seconds: float | None) -> None:
    assert read_stall_after(text) == seconds


@pytest.mark.parametrize("text", ["soon", "-1", "0", "nan", "1e9"])
def test_what_is_no_time_is_said_and_ignored(text: str, caplog: pytest.LogCaptureFixture) -> None:
    assert read_stall_after(text) is None
    assert f"PACELINE_STALL_AFTER={text}" in caplog.text
