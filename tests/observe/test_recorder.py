"""What ranks record while they train, in every way that people train."""

from __future__ import annotations

import contextlib
import math
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline import DistributedDataParallel as DDP
from paceline.errors import StepError
from paceline.exit_reason import note_exception
from paceline.observe.recording import active_recorder
from paceline.observe.records import Activity, StepRecord
from paceline.observe.ring import read_history, read_status
from paceline.observe.run_folder import RUN_DIR, RunFolder
from paceline.testing import RanksFailedError, run_ranks
from tests.children import begin_in_fork, wait_for
from tests.observe.recorded_training import make_model, record, train

WRITE_EVERY_S = 0.1


def check_order(step: StepRecord) -> None:
    """Stamps are in the order in which things happen."""
    stamps = [
        step.began_ns,
        step.forward_began_ns,
        step.forward_ended_ns,
        step.backward_began_ns,
        step.backward_ended_ns,
        step.reduced_ns,
        step.optimizer_began_ns,
        step.optimizer_ended_ns,
    ]
    seen = [stamp for stamp in stamps if stamp]
    assert seen == sorted(seen)
    for bucket in step.buckets:
        assert bucket.ready_ns or step.is_joined  # who has joined has no gradients
        assert step.backward_began_ns <= bucket.began_ns <= bucket.ended_ns
        assert bucket.ready_ns <= bucket.began_ns
        assert bucket.ended_ns <= step.reduced_ns


# --- the ordinary loop ----------------------------------------------------------------------------


def plain_loop() -> None:
    os.umask(0)
    train(DDP(make_model()), 6)


def test_a_plain_loop(tmp_path: Path) -> None:
    histories = record(tmp_path, plain_loop)
    assert [history.info.rank for history in histories] == [0, 1]
    for history in histories:
        assert [step.step for step in history.steps] == [1, 2, 3, 4, 5, 6]
        for step, following in zip(history.steps, history.steps[1:], strict=False):
            assert following.began_ns == step.ended_ns
        for step in history.steps:
            check_order(step)
            assert all((step.forward_began_ns, step.backward_began_ns, step.optimizer_began_ns))
            assert step.samples == 5
            assert math.isfinite(step.loss)
            assert [bucket.bytes for bucket in step.buckets] == [196]
        assert all(step.cpu_ns >= 0 for step in history.steps)  # asked for every 50 ms
        names = [set(bucket.parameters) for bucket in history.info.buckets]
        assert names[0] == {"0.weight", "0.bias", "2.weight", "2.bias"}
        assert [bucket.first_step for bucket in history.info.buckets] == [1, 2]  # cut anew
        status = history.status
        assert status.activity is Activity.ENDED
        assert status.detail == ""
        assert status.loss == history.steps[-1].loss
        assert status.samples_per_s > 0
        assert status.rss_bytes > 1 << 20
        assert 0 <= status.waiting_share <= 1
        assert status.last_rank in (0, 1)
        assert history.info.world == 2
        assert history.info.transport == "shm"
        assert history.notes == ()
    mode = stat.S_IMODE((tmp_path / "run").stat().st_mode)
    assert mode == 0o700
    for rank in (0, 1):
        file = RunFolder(tmp_path / "run").events(rank)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def without_folder() -> bool:
    model = DDP(make_model())
    train(model, 2)
    return model.reducer.clock.observer is None


def test_without_a_folder_nothing_is_recorded() -> None:
    assert run_ranks(1, without_folder, env={RUN_DIR: None}) == [True]


def evaluates(path: str) -> list[list[int]]:
    """What is in the file at each forward of an evaluation, if 100 ms have passed before it."""
    model = DDP(make_model())
    train(model, 5)
    found = []
    recorder = active_recorder()
    assert recorder is not None
    with torch.no_grad():
        model(torch.randn(5, 4))  # ends the step before it
        recorder._next_write_ns = 0
        for _ in range(2):
            model(torch.randn(5, 4))
            found.append([step.step for step in read_history(path).steps])
    train(model, 1)
    return found


def test_an_evaluation_writes_what_is_over(tmp_path: Path) -> None:
    """However soon after a write it begins, and however long it takes."""
    env = {RUN_DIR: str(tmp_path)}
    path = str(RunFolder(tmp_path).events(0))
    assert run_ranks(1, evaluates, path, env=env) == [[[1, 2, 3, 4, 5]] * 2]


def steps_in_the_file(path: str) -> list[int]:
    """Look into the own file while the job runs."""
    model = DDP(make_model())
    train(model, 5)
    time.sleep(2 * WRITE_EVERY_S)
    train(model, 1)
    return [step.step for step in read_history(RunFolder(path).events(0)).steps]


def test_what_is_over_is_in_the_file_soon(tmp_path: Path) -> None:
    """Records are written together now and then; the sixth step is not over."""
    (found,) = run_ranks(1, steps_in_the_file, str(tmp_path), env={RUN_DIR: str(tmp_path)})
    assert found == [1, 2, 3, 4, 5]


# --- other loops ----------------------------------------------------------------------------------


def accumulating_loop() -> None:
    model = DDP(make_model())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(3):
        for _ in range(2):
            with model.no_sync():
                model(torch.randn(5, 4)).sum().backward()
        loss = model(torch.randn(7, 4)).sum()
        paceline.log(loss=loss)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(torch.randn(100, 4))  # an evaluation is no part of a step


def test_accumulation_counts_as_one_step(tmp_path: Path) -> None:
    for history in record(tmp_path, accumulating_loop):
        assert [step.step for step in history.steps] == [1, 2, 3]
        assert [step.samples for step in history.steps] == [17, 17, 17]
        for step in history.steps:
            check_order(step)
            assert math.isfinite(step.loss)


def two_wrappers() -> None:
    """As a GAN has them: two models, two optimizers; then both in one backward."""
    first, second = DDP(make_model()), DDP(nn.Linear(1, 1))
    one = torch.optim.SGD(first.parameters(), 0.01)
    two = torch.optim.SGD(second.parameters(), 0.01)
    for _ in range(2):
        first(torch.randn(3, 4)).sum().backward()
        one.step()
        second(torch.randn(6, 1)).sum().backward()
        two.step()
    second(first(torch.randn(3, 4))).sum().backward()
    one.step()
    two.step()


def test_several_wrappers(tmp_path: Path) -> None:
    for history in record(tmp_path, two_wrappers):
        found = sorted((step.wrapper, step.step, step.samples) for step in history.steps)
        assert found == [(0, 1, 3), (0, 2, 3), (0, 3, 3), (1, 1, 6), (1, 2, 6), (1, 3, 3)]
        for step in history.steps:
            check_order(step)
            assert step.optimizer_ended_ns
        assert {bucket.wrapper for bucket in history.info.buckets} == {0, 1}


class Raises(nn.Module):
    """A model that raises when it is told to, on every rank alike."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()
        self.raises = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.raises:
            raise RuntimeError("no forward today")
        return self.inner(x)


class RaisesBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise RuntimeError("no backward today")


def loop_that_raises() -> None:
    module = Raises()
    model = DDP(module)
    train(model, 1)
    module.raises = True
    with contextlib.suppress(RuntimeError):
        model(torch.randn(5, 4))
    module.raises = False
    with contextlib.suppress(RuntimeError):
        model(RaisesBackward.apply(torch.randn(5, 4, requires_grad=True))).sum().backward()
    train(model, 2)
    raise ValueError("this is how it ends")


def test_exceptions_and_the_end(tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError):
        record(tmp_path, loop_that_raises)
    for rank in (0, 1):
        history = read_history(RunFolder(tmp_path / "run").events(rank))
        assert history.status.activity is Activity.ENDED
        assert "ValueError: this is how it ends (" in history.status.detail
        assert "test_recorder.py:" in history.status.detail
        assert [step.step for step in history.steps] == [1, 3, 4]  # 2 is the one that raised
        assert "PeerFailedError" in history.notes[0].text
        for step in history.steps:
            check_order(step)


def skipping_loop() -> None:
    model = DDP(make_model(), nonfinite="skip")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(3):
        optimizer.zero_grad()
        scale = math.nan if step == 1 else 1.0
        (model(torch.randn(5, 4)) * scale).sum().backward()
        optimizer.step()


def test_skipped_steps_are_marked(tmp_path: Path) -> None:
    for history in record(tmp_path, skipping_loop):
        assert [step.is_skipped for step in history.steps] == [False, True, False]


def failing_step() -> None:
    model = DDP(make_model(), nonfinite="raise")
    train(model, 1)
    with pytest.raises(StepError):
        (model(torch.randn(5, 4)) * math.nan).sum().backward()
    train(model, 1)


def test_failed_steps_are_noted(tmp_path: Path) -> None:
    for history in record(tmp_path, failing_step):
        assert [step.step for step in history.steps] == [1, 3]
        (note,) = history.notes
        assert note.kind == "error"
        assert note.text.startswith("NonFiniteGradientError: ")


def joining_loop() -> None:
    model = DDP(make_model())
    with model.join():
        train(model, 2 + 2 * torch.distributed.get_rank())


def test_joined_ranks_record_that_they_keep_company(tmp_path: Path) -> None:
    first, second = record(tmp_path, joining_loop)
    assert [step.is_joined for step in first.steps] == [False, False, True, True]
    assert [step.is_joined for step in second.steps] == [False] * 4
    for step in first.steps:
        check_order(step)
        assert step.waited_ns < 60e9


def regrouping_loop() -> None:
    model = DDP(make_model())
    train(model, 2)
    model._update_process_group(torch.distributed.new_group([0, 1]))
    train(model, 2)


def test_another_group_is_noted(tmp_path: Path) -> None:
    for rank, history in enumerate(record(tmp_path, regrouping_loop)):
        assert [note.text for note in history.notes] == [f"goes on as rank {rank} of 2"]
        assert [step.step for step in history.steps] == [1, 2, 3, 4]


# --- forks ----------------------------------------------------------------------------------------


def train_in_child() -> None:
    assert paceline.observe.recording.active_recorder() is None
    paceline.log(loss=1.0)
    paceline.observe.note("test", "from the child")
    note_exception(ValueError("the end of the child"))


def forking_loop() -> None:
    model = DDP(make_model())
    train(model, 2)
    code = wait_for(begin_in_fork(train_in_child))
    assert code == 0, code
    train(model, 2)


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    for history in record(tmp_path, forking_loop):
        assert [step.step for step in history.steps] == [1, 2, 3, 4]
        assert history.notes == ()
        assert history.status.activity is Activity.ENDED


# --- status ---------------------------------------------------------------------------------------


def activities(path: str) -> list[str]:
    """Read the own file at every moment of a step."""
    events = RunFolder(path).events(0)
    seen: list[str] = []

    def look(*_: object) -> None:
        status = read_status(events)
        seen.append(f"{status.activity.name} {status.step}")

    model = DDP(make_model())
    look()
    model.module[0].register_forward_hook(look)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    optimizer.register_step_pre_hook(look)
    for _ in range(2):
        output = model(torch.randn(5, 4))
        look()
        output.register_hook(look)
        output.sum().backward()
        look()
        optimizer.step()
        look()
    return seen


def test_the_status_says_what_a_rank_does(tmp_path: Path) -> None:
    (seen,) = run_ranks(1, activities, str(tmp_path), env={RUN_DIR: str(tmp_path)})
    assert seen[0] == "STARTING 0"
    for step in (1, 2):
        part = seen[1 + (step - 1) * 6 : 1 + step * 6]
        # The output's hook may run before or after the one that begins the step.
        assert part[2] in (f"LOSS {step}", f"BACKWARD {step}")
        del part[2]
        assert part == [
            f"FORWARD {step}",
            f"LOSS {step}",
            f"REDUCED {step}",
            f"OPTIMIZER {step}",
            f"INPUT {step + 1}",
        ]
