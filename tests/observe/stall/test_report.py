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
    assert "none of them is behind" in name_culprit(with_rank_1(view(1, Activity.WAITING)))
    assert name_culprit([]) == "No rank has recorded anything yet."


def test_a_rank_that_records_elsewhere_is_named() -> None:
    """Hosts with a folder each: all that are seen wait for those that are not."""
    assert name_culprit(list(WAITS)).startswith("Rank 1 keeps the others waiting, it seems: all")
    assert name_culprit(list(WAITS[:1])).startswith("Ranks 1, 2 keep the others waiting")
    late = view(1, Activity.FORWARD)
    assert name_culprit([WAITS[0], late]).startswith("Rank 1 (pid 101 on node7)")


def test_a_rank_that_has_ended_keeps_nobody_who_does_not_wait() -> None:
    over = replace(view(1, Activity.ENDED), state=ProcessState.DEAD)
    saves = view(0, Activity.INPUT, where="between two steps")
    assert name_culprit([saves, over]).startswith("Rank 0 (pid 100 on node7)")
    assert not is_stalled([saves, over])
    assert name_culprit([WAITS[0], over]).startswith("Rank 1 (pid 101 on node7) is dead")
    assert is_stalled([WAITS[0], over])
    killed = replace(over, status=replace(over.status, activity=Activity.FORWARD))
    assert is_stalled([saves, killed])


def test_a_wait_is_long_beside_a_usual_one() -> None:
    """Doctor: a healthy step of half a minute may keep ranks waiting for seconds."""
    for usual_s, is_long in ((0.0, True), (0.1, True), (1.4, True), (1.6, False), (9.0, False)):
        views = with_rank_1(view(1, Activity.FORWARD))
        views = [
            replace(each, account=replace(each.account, usual_wait_s=usual_s))  # type: ignore[type-var]
            for each in views
        ]
        assert is_stalled(views) is is_long


def test_all_stacks_are_in_the_file_and_the_first_on_the_terminal() -> None:
    late = [replace(view(n, Activity.FORWARD), stack=f"at line {n % 6}") for n in range(1, 13)]
    views = [WAITS[0], *late]
    text, shown = report_text(views), report_text(views, most=4)
    for line in range(6):
        assert f"at line {line}" in text
    assert "  ranks 1, 7: stack" in text
    assert shown.count(": stack (") == 4
    assert "and 2 more stacks in the file" in shown


def test_the_last_collectives_of_every_rank() -> None:
    one = view(1, Activity.FORWARD, collectives=("reduction #1",))  # type: ignore[arg-type]
    two = view(2, Activity.WAITING, collectives=("reduction #2",))  # type: ignore[arg-type]
    text = report_text([WAITS[0], one, two])
    assert "last collectives of rank 1, newest first:\n    reduction #1\n" in text
    assert "last collectives of rank 2, newest first:\n    reduction #2\n" in text
    assert text.index("of rank 1, newest") < text.index("of rank 2, newest")


def test_if_nobody_waits_all_stacks_are_told() -> None:
    views = [replace(view(n, Activity.INPUT, age_s=n), stack=f"line {n}") for n in (1, 2)]
    text = report_text(views)
    assert text.index("  rank 2: stack") < text.index("  rank 1: stack")


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
