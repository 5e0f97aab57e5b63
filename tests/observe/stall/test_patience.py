"""When a rank that is at work says that nobody moves, and when it is left to those that wait."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.observe.records import Activity, Status
from paceline.observe.run_folder import RunFolder
from paceline.observe.stall import patience as patience_module
from paceline.observe.stall.patience import Patience
from paceline.observe.stall.views import RankView
from paceline.processes import ProcessState
from tests.observe.sample_records import INFO

LONG_S = 700.0


def at_work(age_s: float, activity: Activity = Activity.INPUT, rank: int = 1) -> RankView:
    since_ns = time.perf_counter_ns() - round(age_s * 1e9)
    status = Status(activity, since_ns, 6, since_ns)
    info = replace(INFO, rank=rank, world=2)
    return RankView(rank, info, status, ProcessState.ALIVE, age_s=age_s)


def on_another_host(age_s: float) -> RankView:
    """Its clock counts from another moment; only the time of day is the same."""
    began_ns = time.time_ns() - round(age_s * 1e9)
    info = replace(INFO, rank=1, world=2, wall_minus_monotonic_ns=began_ns - 12345)
    return RankView(1, info, Status(Activity.INPUT, 12345, 6, 12345), ProcessState.UNKNOWN)


OWN = at_work(LONG_S, rank=0)


@pytest.mark.parametrize(
    ("other", "is_stalled"),
    [
        (at_work(LONG_S), True),
        (at_work(LONG_S, Activity.FORWARD), True),
        (at_work(30.0), False),
        (at_work(30.0, Activity.WAITING), False),
        (at_work(LONG_S, Activity.ENDED), True),
        (on_another_host(LONG_S), True),
        (on_another_host(30.0), False),
    ],
)
def test_nobody_moves(
    other: RankView, is_stalled: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    patience = Patience(RunFolder(tmp_path), 0, None)
    monkeypatch.setattr(patience_module, "look_at_files", lambda _: [OWN, other])
    assert patience.is_stalled(OWN.status) is is_stalled
    assert patience.is_of_nobody is is_stalled
    assert not patience.is_stalled(at_work(500.0).status), "it may take 600 s"
    assert not patience.is_stalled(at_work(LONG_S, Activity.ENDED).status)


def test_a_long_evaluation_of_all_ranks_is_expected_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    patience = Patience(RunFolder(tmp_path), 0, None)
    monkeypatch.setattr(patience_module, "look_at_files", lambda _: [OWN])
    before = replace(OWN.status, since_ns=1)
    patience.learn(before, replace(before, activity=Activity.FORWARD, since_ns=400 * 10**9))
    assert not patience.is_stalled(OWN.status)


@pytest.mark.parametrize("activity", list(Activity))
def test_a_budget_that_was_set_holds_for_whatever_a_rank_does(
    activity: Activity, tmp_path: Path
) -> None:
    patience = Patience(RunFolder(tmp_path), 0, 2.0)
    assert not patience.is_stalled(at_work(1.0, activity).status)
    assert patience.is_stalled(at_work(3.0, activity).status) is (activity is not Activity.ENDED)
