"""Who is judged to be stuck, from what is seen of all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.elastic.members import MemberState
from paceline.elastic.stuck import Observation, StillRanks, StuckWatch, Watched
from paceline.observe.records import Activity, Status
from paceline.observe.run_folder import RunFolder
from paceline.observe.stall.account import Account


def observe(
    activity: Activity, step: int = 7, *, since: int = 1, is_stopped: bool = False
) -> Observation:
    return Observation(is_stopped, Status(activity, since, step, since))


def told(activity: Activity, *, cpu_s: float = 0.0, step: int = 7, **said: Any) -> Observation:
    """A rank that was asked what it does."""
    account = Account(0, "", 1, **said)
    return Observation(False, Status(activity, 1, step, 1), cpu_s=cpu_s, account=account)


def judge(seen: dict[int, Observation], after_s: float = 5.0) -> dict[int, str]:
    watch = StuckWatch(RunFolder(Path("unused")), 5.0)
    assert watch.decide(seen, 100.0) == {}
    return watch.decide(seen, 100.0 + after_s)


def test_who_is_stopped_is_stuck_also_if_others_move() -> None:
    watch = StuckWatch(RunFolder(Path("unused")), 5.0)
    stopped = observe(Activity.WAITING, is_stopped=True)
    watch.decide({0: stopped, 1: observe(Activity.FORWARD, since=1)}, 100.0)
    found = watch.decide({0: stopped, 1: observe(Activity.FORWARD, since=2)}, 105.0)
    assert list(found) == [0]
    assert "stopped in step 7 (waiting) for 5 s" in found[0]


def test_who_has_come_least_far_is_stuck() -> None:
    waiting = observe(Activity.WAITING)
    assert list(judge({0: waiting, 1: observe(Activity.FORWARD), 2: waiting})) == [1]
    ahead = observe(Activity.FORWARD, 8)
    assert list(judge({0: ahead, 1: observe(Activity.OPTIMIZER, 7), 2: ahead})) == [1]


def test_nobody_is_stuck_before_the_deadline() -> None:
    assert judge({0: observe(Activity.WAITING), 1: observe(Activity.FORWARD)}, 4.9) == {}


def test_nobody_is_stuck_while_one_moves() -> None:
    watch = StuckWatch(RunFolder(Path("unused")), 5.0)
    watch.decide({0: observe(Activity.WAITING), 1: observe(Activity.FORWARD, since=1)}, 100.0)
    moved = {0: observe(Activity.WAITING), 1: observe(Activity.FORWARD, since=2)}
    assert watch.decide(moved, 106.0) == {}


def test_all_in_the_same_place_cannot_be_told_apart() -> None:
    assert judge({0: observe(Activity.INPUT), 1: observe(Activity.INPUT)}) == {}


@pytest.mark.parametrize("activity", [*Activity])
def test_who_does_not_wait_is_stuck_if_the_others_do(activity: Activity) -> None:
    waits, hangs = told(activity, is_waiting=True), told(activity)
    assert list(judge({0: waits, 1: hangs, 2: waits})) == [1]
    assert judge({0: waits, 1: waits}) == {}
    assert judge({0: hangs, 1: hangs}) == {}


def test_who_has_not_answered_is_not_judged_by_what_others_say() -> None:
    waits = told(Activity.FORWARD, is_waiting=True)
    assert judge({0: waits, 1: observe(Activity.FORWARD)}) == {}


def test_who_waits_is_not_stuck_although_it_has_come_least_far() -> None:
    waits = told(Activity.INPUT, is_waiting=True)
    assert list(judge({0: waits, 1: told(Activity.OPTIMIZER)})) == [1]
    ahead = told(Activity.WAITING, is_waiting=True)  # both wait: for one that calls something else
    assert list(judge({0: waits, 1: ahead})) == [0]


@pytest.mark.parametrize(
    ("activity", "said"),
    [
        (Activity.INPUT, {}),
        (Activity.LOSS, {}),
        (Activity.REDUCED, {}),
        (Activity.FORWARD, {"is_evaluating": True}),
        (Activity.FORWARD, {"is_compiling": True}),
    ],
)
def test_who_computes_between_two_steps_is_not_stuck(
    activity: Activity, said: dict[str, Any]
) -> None:
    waits = told(activity, is_waiting=True)
    watch = StuckWatch(RunFolder(Path("unused")), 5.0)
    watch.decide({0: waits, 1: told(activity, **said)}, 100.0)
    assert watch.decide({0: waits, 1: told(activity, cpu_s=1.0, **said)}, 105.0) == {}
    assert list(watch.decide({0: waits, 1: told(activity, cpu_s=0.01, **said)}, 106.0)) == [1]


def test_on_several_hosts_the_coordinator_judges_by_what_ranks_say() -> None:
    here, there = (StuckWatch(RunFolder(Path("unused")), 5.0) for _ in range(2))
    coordinator = StillRanks()
    seen = [
        (here, {0: told(Activity.FORWARD, is_waiting=True)}),
        (there, {1: told(Activity.FORWARD)}),
    ]
    found: list[dict[int, str]] = []
    for watch, ranks in seen:
        watch.decide(ranks, 100.0, False)
        assert watch.decide(ranks, 105.0, False) == {}
        found.append(coordinator.judge(watch.still, [0, 1], 105.0))
    assert found[0] == {}
    assert list(found[1]) == [1]
    assert "stuck in step 7 (forward) for 5 s while others waited" in found[1][1]


def test_who_has_recorded_nothing_is_not_judged() -> None:
    assert judge({0: observe(Activity.WAITING), 1: Observation(False, None)}) == {}


def test_without_a_deadline_nobody_looks() -> None:
    watch = StuckWatch(RunFolder(Path("unused")), 0.0)
    assert watch.until_next_s() is None
    assert watch.judge([Watched(0, 0, 1, MemberState.TRAINING)]) == {}


def test_whose_interpreter_does_not_answer_is_stuck_in_whatever_state() -> None:
    for state in (MemberState.TRAINING, MemberState.WAITING, MemberState.READY):
        watch = StuckWatch(RunFolder(Path("unused")), 5.0)
        assert watch.decide({0: Observation(False, None, state, silent_s=4.9)}, 100.0) == {}
        found = watch.decide({0: Observation(False, None, state, silent_s=5.1)}, 100.2)
        assert "its interpreter did not answer for 5 s" in found[0]


def starting(cpu_s: float) -> Observation:
    return Observation(False, None, MemberState.STARTING, cpu_s=cpu_s)


def test_who_is_on_its_way_is_stuck_if_none_of_them_uses_a_processor() -> None:
    watch = StuckWatch(RunFolder(Path("unused")), 5.0)
    waiting = Observation(False, None, MemberState.WAITING)
    assert watch.decide({0: starting(1.0), 1: starting(1.0), 2: waiting}, 100.0) == {}
    assert watch.decide({0: starting(1.0), 1: starting(1.4), 2: waiting}, 105.0) == {}
    found = watch.decide({0: starting(1.02), 1: starting(1.41), 2: waiting}, 110.0)
    assert list(found) == [0, 1]
    assert "stuck before train(state) for 10 s" in found[0]
