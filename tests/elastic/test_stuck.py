"""Who is judged to be stuck, from what is seen of all ranks."""

from __future__ import annotations

from pathlib import Path

from paceline.elastic.members import MemberState
from paceline.elastic.stuck import Observation, StuckWatch, Watched
from paceline.observe.records import Activity, Status
from paceline.observe.run_folder import RunFolder


def observe(
    activity: Activity, step: int = 7, *, since: int = 1, is_stopped: bool = False
) -> Observation:
    return Observation(is_stopped, Status(activity, since, step, since))


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
