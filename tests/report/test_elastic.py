"""Jobs whose ranks come and go: the report says who left, when and why."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.observe.membership import MembershipChange
from paceline.observe.records import Note
from paceline.observe.run_folder import RunFolder
from paceline.observe.stall.report import describe_run, is_stalled, report_json
from paceline.observe.stall.views import look_at_ranks
from paceline.report.analysis import analyse
from paceline.report.page import render_report
from paceline.report.run import Run, RunState, read_run
from paceline.report.trace import write_trace
from paceline.report.wording import membership_summary, quiet_events, warnings
from tests.elastic.jobs import run_job
from tests.report.histories import START_NS, Job, make_run, simulate, write_folder, write_history

GIVEN_UP = Note(START_NS + 10**9, "error", "GroupAbortedError: all_reduce of bucket 0 in step 14")
WENT_ON = Note(START_NS + 10**9, "group", "goes on as rank 0 of 3")


def elastic_run(*, notes: tuple[tuple[int, Note], ...] = ()) -> Run:
    run = make_run(Job(steps=40, notes=notes))
    first = run.histories[0]
    start_s = (first.steps[0].began_ns + first.info.wall_minus_monotonic_ns) / 1e9
    changes = (
        MembershipChange(start_s, 0, 4, 0),
        MembershipChange(
            start_s + 1.2, 1, 3, 14, "rank 3 was <killed>", "", None, (0.1, 0.2, 0.3, 0)
        ),
        MembershipChange(start_s + 2.0, 2, 4, 23, "rank 3 joined", "", None, (0, 0.1, 0, 0)),
    )
    return replace(run, membership=changes)


def test_changes_are_on_the_page_in_json_and_in_the_trace() -> None:
    measured = analyse(elastic_run())
    found = measured.analysis.to_dict()["membership"]
    assert [(each["epoch"], each["world"], each["step"]) for each in found] == [
        (0, 4, 0),
        (1, 3, 14),
        (2, 4, 23),
    ]
    assert found[1]["took_s"] == 0.6
    assert found[1]["phases_s"]["rebuilt"] == 0.3
    page = render_report(measured)
    assert "rank 3 was &lt;killed&gt;" in page
    assert 'data-changes="14,23"' in page
    assert "membership changed 2 times, 3 to 4 ranks; 700 ms in all" in page
    file = io.StringIO()
    write_trace(file, measured.analysis, measured.steps)
    marks = [e for e in json.loads(file.getvalue())["traceEvents"] if e["ph"] == "i"]
    assert [mark["name"] for mark in marks] == ["epoch 1: 3 ranks", "epoch 2: 4 ranks"]


def test_a_step_that_was_given_up_because_a_rank_died_is_no_warning() -> None:
    run = elastic_run(notes=((0, GIVEN_UP), (1, WENT_ON)))
    analysis = analyse(run).analysis
    assert not any("GroupAborted" in text for text in warnings(analysis))
    members, others = quiet_events(analysis)
    assert (members, [event.kind for event in others]) == ([], ["error"])
    rigid = analyse(replace(run, membership=())).analysis
    assert any("GroupAborted" in text for text in warnings(rigid))
    assert membership_summary(rigid) == ""
    assert [event.kind for event in quiet_events(rigid)[0]] == ["group"]


def write_replaced(path: Path, *, pids: list[dict[str, int]]) -> RunFolder:
    """Rank 2 of 3 was replaced after step 20 of 40; a spare with no steps has a file, too."""
    job = Job(ranks=3, steps=40)
    folder = RunFolder(write_folder(job, path))
    old = simulate(job)[2]
    new = replace(old, info=replace(old.info, pid=old.info.pid + 1000), steps=old.steps[20:])
    write_history(replace(old, steps=old.steps[:20]), folder.events(2))
    write_history(new, folder.events(2))
    spare = replace(old, info=replace(old.info, rank=3, pid=77), steps=())
    write_history(spare, folder.events(3))
    lines = (
        {"at_s": 1.0 + epoch, "epoch": epoch, "world": 3, "step": 20 * epoch}
        | {"host": old.info.host, "pids": each}
        for epoch, each in enumerate(pids)
    )
    folder.membership.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_records_of_a_replaced_rank_are_read_too(tmp_path: Path) -> None:
    first = {str(each.info.rank): each.info.pid for each in simulate(Job(ranks=3, steps=1))}
    members = [first, first | {"2": first["2"] + 1000}]
    run = read_run(write_replaced(tmp_path / "run", pids=members).path)
    assert [history.info.rank for history in run.histories] == [0, 1, 2], "no spare"
    assert [record.step for record in run.histories[2].steps] == list(range(1, 41))
    assert run.problems == ()
    assert all(len(step.ranks) == 3 for step in analyse(run).steps)


def test_records_that_are_not_kept_are_mentioned(tmp_path: Path) -> None:
    pid = simulate(Job(ranks=3, steps=1))[2].info.pid
    members = [{"2": 4}, {"2": pid}, {"2": pid + 1000}]
    run = read_run(write_replaced(tmp_path / "run", pids=members).path)
    assert run.problems == ("Rank 2 has had 3 processes; records of 1 of them are not kept.",)


@pytest.mark.slow
def test_a_real_job(tmp_path: Path) -> None:
    """One rank is killed, its spare takes over, and nobody is called dead or late for it."""
    ended = run_job(tmp_path, faults=[("kill", "forward", 8, 1)], spares=1, hold_s=60.0)
    assert ended.code == 0, ended.logs()
    run = read_run(ended.folder.path)
    assert run.state is RunState.FINISHED
    assert [change.epoch for change in run.membership][:2] == [0, 1]
    last = run.membership[-1]
    assert last.pids is not None
    assert len(last.pids) == 3
    analysis = analyse(run).analysis
    assert "killed by SIGKILL" in analysis.membership[1].why
    assert (analysis.first_step, analysis.last_step) == (2, 20)
    assert not [text for text in warnings(analysis) if "Aborted" in text or "is gone" in text]
    views = look_at_ranks(ended.folder, 0.0)
    assert not is_stalled(views)
    text = describe_run(ended.folder, views)
    assert "the job is over; all ranks ended in order" in text
    assert "elastic: " in text
    standings = {each["rank"]: each["standing"] for each in report_json(views)["ranks"]}
    assert set(last.pids) == {rank for rank, each in standings.items() if each == "member"}
