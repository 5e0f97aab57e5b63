"""Who is named, from what can be seen of the ranks: the table of the report's cases."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.observe.membership import Standing
from paceline.observe.records import Activity, RankInfo, Status
from paceline.observe.stall.account import Account, WatchInfo
from paceline.observe.stall.report import (
    is_ended,
    is_stalled,
    name_culprit,
    report_json,
    report_text,
)
from paceline.observe.stall.views import RankView, behind
from paceline.processes import ProcessState


def view(rank: int, activity: Activity, step: int = 6, age_s: float = 3.0, **more: str) -> RankView:
    info = RankInfo(rank, rank, 3, "node7", 100 + rank, 1, 2, "shm", "", 0)
    status = Status(activity, 1, step, 1)
    watch = WatchInfo(rank, "node7", "here", 100 + rank, 1, 1, 60, "0x1")
    is_waiting = activity is Activity.WAITING or "collective" in more
    account = Account(rank, "t", 1, is_waiting=is_waiting, **more)  # type: ignore[arg-type]
    alive = ProcessState.ALIVE
    return RankView(rank, info, status, alive, watch, account, was_asked=True, age_s=age_s)


WAITS = view(0, Activity.WAITING), view(2, Activity.WAITING)


def with_rank_1(one: RankView) -> list[RankView]:
    return [WAITS[0], one, WAITS[1]]


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (view(1, Activity.FORWARD, where="in forward of encoder.3"), "in forward of encoder.3"),
        (view(1, Activity.INPUT, where="waiting for the data loader"), "the data loader for 3.0 s"),
        (view(1, Activity.OPTIMIZER, step=5), "in optimizer.step for 3.0 s in step 5"),
        (replace(view(1, Activity.FORWARD), state=ProcessState.STOPPED), "is stopped"),
        (replace(view(1, Activity.BACKWARD), state=ProcessState.DEAD), "is dead; it was in backw"),
        (replace(view(1, Activity.FORWARD), account=None), "holds the GIL"),
        (view(1, Activity.INPUT, collective="torch.distributed.barrier"), "torch.distributed.barr"),
        (view(1, Activity.FORWARD, locks="a deadlock, it seems"), "a deadlock, it seems"),
    ],
)
def test_the_one_that_does_not_wait_is_named(one: RankView, words: str) -> None:
    views = with_rank_1(one)
    told = name_culprit(views)
    assert told.startswith("Rank 1 (pid 101 on node7)")
    assert words in told
    assert [each["is_behind"] for each in report_json(views)["ranks"]] == [False, True, False]
    text = report_text(views)
    assert text.startswith(told)
    assert all(f"\n  {rank}     10{rank}" in text for rank in range(3))


def test_the_one_that_is_furthest_behind_comes_first() -> None:
    late = view(1, Activity.OPTIMIZER, step=5), view(3, Activity.FORWARD)
    views = [WAITS[0], late[1], late[0]]
    assert [each.rank for each in behind(views)] == [1, 3]
    assert "Also behind: rank 3" in name_culprit(views)


def test_nobody_waits() -> None:
    views = [view(0, Activity.INPUT, age_s=3), view(1, Activity.INPUT, age_s=9)]
    told = name_culprit(views)
    assert told.startswith("No rank waits for another; rank 1")
    assert not report_json(views)["stalled"]


def test_all_wait_in_the_same_collective() -> None:
    assert "none of them is behind" in name_culprit(list(WAITS))
    assert name_culprit([]) == "No rank has recorded anything yet."


def test_a_job_that_is_over() -> None:
    over = [replace(each, state=ProcessState.DEAD) for each in WAITS]
    assert is_ended(over)
    assert not is_ended([*over, view(1, Activity.FORWARD)])


def test_spares_and_those_that_left_keep_nobody_waiting() -> None:
    """In an elastic job: neither is named, and a death that the others got over is no stall."""
    spare = replace(view(3, Activity.STARTING, step=0), standing=Standing.SPARE)
    gone = replace(view(1, Activity.FORWARD), state=ProcessState.DEAD, standing=Standing.LEFT)
    late = view(4, Activity.FORWARD, where="in forward of encoder.3")
    views = [*WAITS, gone, spare, late]
    assert behind(views) == [late]
    assert name_culprit(views).startswith("Rank 4 (pid 104 on node7) keeps the others waiting")
    text = report_text(views)
    assert "a spare: it waits" in text
    assert "no part of the job any more" in text
    quick = [replace(each, age_s=0.1) for each in WAITS]
    assert not is_stalled([*quick, gone, spare])
    dead = replace(gone, standing=Standing.MEMBER)
    assert is_stalled([*quick, dead, spare])


def test_what_a_rank_says_cannot_upset_a_terminal() -> None:
    views = with_rank_1(view(1, Activity.FORWARD, where="in \x1b[2Jforward"))
    assert "\x1b" not in report_text(views)
