"""on_step: every step reaches the function, whatever it does with it."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

import paceline
from paceline import DistributedDataParallel as DDP
from paceline.observe import StepRecord
from paceline.observe.run_folder import RUN_DIR, RunFolder
from paceline.testing import run_ranks
from tests.children import begin_in_fork, wait_for
from tests.observe.recorded_training import captured_warnings, make_model, train

NO_FOLDER = {RUN_DIR: None}


def listen() -> tuple[list[int], list[bool], list[float]]:
    """Without a folder; a wrapper that was made before is heard too."""
    model = DDP(make_model())
    train(model, 2)
    found: list[StepRecord] = []
    threads: list[bool] = []

    def keep(record: StepRecord) -> None:
        found.append(record)
        threads.append(threading.current_thread() is threading.main_thread())

    with paceline.observe.on_step(keep):
        train(model, 3)
    train(model, 2)
    return [record.step for record in found], threads, [record.loss for record in found]


def test_every_step_in_the_thread_that_trains() -> None:
    for steps, threads, losses in run_ranks(2, listen, env=NO_FOLDER):
        assert steps == [3, 4, 5]
        assert threads == [True] * 3
        assert all(loss == loss for loss in losses)


def test_steps_that_were_over_are_not_handed_over(tmp_path: Path) -> None:
    """With a folder they may not be written yet. The second step ends with the next forward."""
    ((steps, _, _),) = run_ranks(1, listen, env={RUN_DIR: str(tmp_path)})
    assert steps == [2, 3, 4, 5]


def listen_badly() -> tuple[list[str], int]:
    model = DDP(make_model())
    found: list[int] = []
    paceline.observe.on_step(lambda record: 1 / 0)
    handle = paceline.observe.on_step(lambda record: found.append(record.step))
    with captured_warnings() as messages:
        train(model, 4)
        handle.remove()
        handle.remove()
    return messages, len(found)


def test_what_raises_is_said_once_and_hurts_nobody() -> None:
    ((messages, count),) = run_ranks(1, listen_badly, env=NO_FOLDER)
    assert len(messages) == 1
    assert "on_step raised" in messages[0]
    assert count == 4


def listen_before() -> list[int]:
    """Before the first wrapper, and with a folder: both get every step; a child gets none."""
    found: list[int] = []
    paceline.observe.on_step(lambda record: found.append(record.step))
    model = DDP(make_model())
    train(model, 2)
    assert wait_for(begin_in_fork(lambda: paceline.observe.note("a", "b"))) == 0
    with torch.no_grad():
        model(torch.randn(1, 4))
    return found


def test_a_listener_that_was_there_first(tmp_path) -> None:
    from paceline.observe.ring import read_history

    assert run_ranks(1, listen_before, env={RUN_DIR: str(tmp_path)}) == [[1, 2]]
    assert len(read_history(RunFolder(tmp_path).events(0)).steps) == 2
