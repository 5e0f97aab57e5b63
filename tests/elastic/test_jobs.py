"""Elastic jobs from end to end: ranks die, stop, leave and join, and training goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from pathlib import Path

import pytest

from paceline.cli.scale import ask
from tests.elastic.jobs import Ended, JobOnSharedServer, check, run_job


def test_undisturbed(tmp_path: Path) -> None:
    ended = run_job(tmp_path)
    check(ended, faults=0, world=3)
    assert [event["epoch"] for event in ended.events()] == [0]


@pytest.mark.parametrize(
    "point", ["bucket", pytest.param("between", marks=pytest.mark.slow)]
)  # all: test_fault_matrix.py
def test_a_killed_rank_comes_back(tmp_path: Path, point: str) -> None:
    ended = run_job(tmp_path, faults=[("kill", point, 5, 0)], hold_s=60.0)
    check(ended, faults=1, world=3)
    last = ended.events()[-1]
    assert "killed by SIGKILL" in last["why"]
    assert last["world"] == 3
    phases = ("noticed_s", "agreed_s", "rebuilt_s", "copied_s", "first_step_s")
    assert all(last[phase] > 0.0 for phase in phases), last


def test_survivors_go_on_smaller_until_the_replacement_is_there(tmp_path: Path) -> None:
    faults = [("kill", "forward", 5, 0)]
    ended = run_job(tmp_path, faults=faults, pause_s=0.3, steps=30,
                    hurries=lambda worlds: worlds == [3, 2, 3])  # fmt: skip
    check(ended, faults=1, world=3, steps=30)
    assert [event["world"] for event in ended.events()] == [3, 2, 3]


@pytest.mark.parametrize("kind", ["exit", pytest.param("raise", marks=pytest.mark.slow)])
def test_a_rank_that_ends_by_itself_comes_back(tmp_path: Path, kind: str) -> None:
    ended = run_job(tmp_path, faults=[(kind, "forward", 5, 2)], hold_s=60.0)
    check(ended, faults=1, world=3)
    text = {"exit": "exited with code 3", "raise": "ValueError: as planned"}[kind]
    assert text in ended.events()[-1]["why"]


@pytest.mark.slow
def test_two_at_once(tmp_path: Path) -> None:
    faults = [("kill", "forward", 5, 0), ("kill", "forward", 5, 2)]
    ended = run_job(tmp_path, faults=faults, hold_s=60.0)
    check(ended, faults=2, world=3)
    assert ended.events()[1]["why"].count("killed by SIGKILL") == 2


def test_a_stopped_rank_counts_as_dead_after_the_deadline(tmp_path: Path) -> None:
    faults = [("stop", "forward", 5, 1)]
    ended = run_job(tmp_path, faults=faults, hold_s=60.0, once_stuck_after_s=1.0)
    check(ended, faults=1, world=3)
    assert "was killed: it was stopped in step" in ended.events()[-1]["why"]


def test_a_stuck_rank_counts_as_dead_after_the_deadline(tmp_path: Path) -> None:
    faults = [("hang", "between", 5, 1)]
    ended = run_job(tmp_path, faults=faults, hold_s=60.0, once_stuck_after_s=1.0, steps=12)
    check(ended, faults=1, world=3, steps=12)
    why = ended.events()[-1]["why"]
    assert "was killed: it was stuck in step" in why
    assert re.search(r"at .*script.py:\d+, in fire$", why), why


def test_sigterm_makes_a_rank_leave_after_its_step(tmp_path: Path) -> None:
    ended = run_job(tmp_path, faults=[("terminate", "forward", 5, 1)], options={"world": 2})
    check(ended, faults=1, world=2, steps=None)
    assert ended.events()[-1]["why"] == "ranks are to join or to leave"


@pytest.mark.slow
def test_the_joiner_dies_while_it_copies_the_state(tmp_path: Path) -> None:
    faults = [("kill", "forward", 5, 1), ("kill", "copy as joiner", 0, -1)]
    check(run_job(tmp_path, faults=faults, hold_s=60.0), faults=2, world=3)


@pytest.mark.parametrize("backend", ["paceline", "gloo"])
@pytest.mark.slow
def test_a_rank_dies_while_others_connect_to_it(tmp_path: Path, backend: str) -> None:
    faults = [("kill", "forward", 5, 2), ("kill", "connect", 5, 1)]
    ended = run_job(tmp_path, faults=faults, hold_s=100.0, backend=backend, respond_s=60.0)
    check(ended, faults=2, world=3)
    assert "did not leave" not in "".join(event["why"] for event in ended.events())


@pytest.mark.parametrize("backend", ["gloo", "paceline"])
@pytest.mark.slow
def test_a_rank_dies_while_others_make_a_group_with_it(tmp_path: Path, backend: str) -> None:
    """They wait in a store, where no connection ends."""
    faults = [("kill", "new group", 0, 1), ("kill", "forward", 5, 2), ("kill", "new group", 5, 0)]
    options = {"new_group": True}
    ended = run_job(tmp_path, faults=faults, hold_s=60.0, backend=backend, options=options)
    check(ended, faults=3, world=3)
    assert "did not leave" not in "".join(event["why"] for event in ended.events())


@pytest.mark.slow
def test_a_rank_that_is_stuck_before_it_meets_the_others(tmp_path: Path) -> None:
    """All were in the same place of their step; who has come to the store can be told from it."""
    faults = [("kill", "forward", 5, 1), ("hang", "recovery", 5, 0)]
    ended = run_job(tmp_path, faults=faults, hold_s=60.0, options={"meet_s": 3.0})
    check(ended, faults=2, world=3)
    assert "was killed: others waited for it" in ended.logs() + str(ended.events())


@pytest.mark.slow
def test_death_before_the_first_step(tmp_path: Path) -> None:
    check(run_job(tmp_path, faults=[("kill", "construction", 0, 1)]), faults=1, world=3)


def test_a_spare_takes_over(tmp_path: Path) -> None:
    """One that was there before the death, not a replacement that came after it."""
    there: set[str] = set()

    def look(job: JobOnSharedServer) -> None:
        members = {str(member) for member in job._members}
        if not list(Path(job._plan.target.args[0]).glob("fired-*")):
            there.update(members)

    ended = run_job(tmp_path, faults=[("kill", "forward", 15, 1)], spares=1, hold_s=60.0,
                    pause_s=0.2, on_wait=look)  # fmt: skip
    check(ended, faults=1, world=3)
    trained = {path.name.removeprefix("done-") for path in ended.out.glob("done-*")}
    assert len(trained - {"0", "1", "2"}) == 1
    assert trained <= there


def test_below_the_minimum_nobody_trains_and_the_job_ends(tmp_path: Path) -> None:
    ended = run_job(tmp_path, ranks=2, faults=[("kill", "forward", 5, 1)], replaces=False,
                    minimum=2, wait_s=1.0)  # fmt: skip
    assert ended.code == 1
    text = ended.folder.failure.read_text()
    assert "there are 1 ranks, fewer than the minimum of 2, for 1 s" in text
    assert {event["world"] for event in ended.events()} <= {2}
    assert last_commit(ended) <= 6  # the step that was under way


@pytest.mark.slow
def test_shares_that_are_uneven(tmp_path: Path) -> None:
    """24 samples on 5 ranks, and on 4 while one is away.

    With dropout, a rank draws as many numbers as it has samples: generators differ.
    """
    ended = run_job(tmp_path, ranks=5, faults=[("kill", "bucket", 5, 2)], pause_s=0.3, steps=30,
                    hurries=lambda worlds: worlds == [5, 4, 5])  # fmt: skip
    check(ended, faults=1, world=5, steps=30, differing=("generator",))


def test_scaling_up_and_down(tmp_path: Path) -> None:
    def scale(job: JobOnSharedServer) -> None:
        if job.worlds() == [3] and not asked:
            ask_in_a_thread(job, 4)
        if job.worlds() == [3, 4] and len(asked) == 1:
            ask_in_a_thread(job, 2)

    def ask_in_a_thread(job: JobOnSharedServer, ranks: int) -> None:
        """As another process does: the launcher's thread has to pass the question on."""
        asked.append(threading.Thread(target=ask, args=(job._folder, ranks)))
        asked[-1].start()

    asked: list[threading.Thread] = []
    ended = run_job(tmp_path, ranks=3, pause_s=0.3, steps=60, on_wait=scale,
                    hurries=lambda worlds: worlds == [3, 4, 2])  # fmt: skip
    check(ended, faults=0, world=2, steps=60)
    assert [event["world"] for event in ended.events()] == [3, 4, 2]
    for each in asked:
        each.join()


@pytest.mark.slow
def test_a_script_that_does_not_train_under_run_is_named(tmp_path: Path) -> None:
    ended = run_job(tmp_path, ranks=2, faults=[("quit", "construction", 0, 0)])
    assert ended.code == 1
    assert "never called a function under @elastic.run" in ended.folder.failure.read_text()


@pytest.mark.slow
def test_a_second_function_is_refused(tmp_path: Path) -> None:
    """The end of the first was the end of the job: nobody would ever give it a place."""
    ended = run_job(tmp_path, ranks=2, options={"again": True})
    assert ended.code == 1
    assert "Do both parts in one" in ended.logs()


def test_a_death_between_step_and_commit_ends_the_job_with_the_remedy(tmp_path: Path) -> None:
    faults = [("kill", "metrics", 5, 1)]
    ended = run_job(tmp_path, faults=faults, options={"metrics_before_commit": True})
    assert ended.fired() == 1
    assert ended.code == 1
    text = ended.folder.failure.read_text()
    assert "killed by SIGKILL" in text
    assert "Call state.commit() directly after the optimizer's step" in text


@pytest.mark.slow
def test_a_rank_that_always_fails_ends_the_job_with_a_reason(tmp_path: Path) -> None:
    ended = run_job(tmp_path, ranks=2, faults=[("raise", "construction", 0, 1)] * 9)
    assert ended.code == 1
    text = ended.folder.failure.read_text()
    assert "rank 1 died 5 times before the first step" in text
    assert "ValueError: as planned" in text


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM]
)
def test_interrupting_the_launcher_ends_all(tmp_path: Path, number: signal.Signals) -> None:
    """SIGTERM leaves time to finish a step and to save it."""

    def interrupt(job: JobOnSharedServer) -> None:
        out = Path(job._plan.target.args[0])
        if list(out.glob("checkpoints/step-*")) and not sent:
            sent.append(os.kill(os.getpid(), number))

    sent: list[None] = []
    ended = run_job(
        tmp_path,
        ranks=2,
        steps=10_000,
        pause_s=0.02,
        options={"save": 10, "workers": 1},
        on_wait=interrupt,
        shutdown_s=60.0,
    )
    assert ended.code == 128 + number
    found = re.search(r"has saved step (\d+) in", ended.logs())
    assert bool(found) == (number == signal.SIGTERM), ended.logs()
    if found:
        newest = max((ended.out / "checkpoints").glob("step-*"))
        assert int(newest.name.removeprefix("step-")) == int(found[1])
        assert last_commit(ended) <= int(found[1]) <= last_commit(ended) + 1


def last_commit(ended: Ended) -> int:
    """As ranks have noted it; a commit after which they regroup is noted by nobody."""
    files = ended.out.glob("digests-*")
    return max(int(json.loads(path.read_text().splitlines()[-1])[0]) for path in files)


@pytest.mark.slow
def test_when_the_last_that_holds_the_state_dies_the_job_ends(tmp_path: Path) -> None:
    faults = [("kill", "forward", 5, 1), ("kill", "recovery", 5, 0)]
    ended = run_job(tmp_path, ranks=2, faults=faults, hold_s=60.0)
    assert ended.code == 1
    assert "nobody holds the state any more" in ended.folder.failure.read_text()


def test_a_rank_that_always_dies_in_its_first_step_ends_the_job(tmp_path: Path) -> None:
    ended = run_job(tmp_path, ranks=2, faults=[("kill", "forward", 5, 1)] * 9, hold_s=60.0)
    assert ended.code == 1
    assert "rank 1 died 5 times in a row" in ended.folder.failure.read_text()
