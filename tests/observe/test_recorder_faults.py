"""A recorder that cannot record disturbs no training, and says so once."""

from __future__ import annotations

import time
import warnings
from pathlib import Path

import paceline
from paceline import DistributedDataParallel as DDP
from paceline.observe.run_folder import RUN_DIR
from paceline.testing import run_ranks
from tests.observe.recorded_training import captured_warnings, make_model, train


def loop_with_warnings() -> list[str]:
    warnings.simplefilter("error")
    with captured_warnings() as found:
        train(DDP(make_model()), 2)
        train(DDP(make_model()), 2)
    return found


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    found = run_ranks(1, loop_with_warnings, env={RUN_DIR: str(tmp_path / "file" / "run")})
    (message,) = found[0]
    assert "rank 0 records nothing" in message
    assert "Training goes on" in message


def broken_writer() -> list[str]:
    with captured_warnings() as found:
        model = DDP(make_model())
        train(model, 2)
        recorder = paceline.observe.recording.active_recorder()
        recorder._writer.append_step_body = lambda _: 1 / 0
        train(model, 4)
        time.sleep(0.1)  # steps are written together, twenty times a second
        train(model, 2)
    return found


def test_a_broken_recorder_is_turned_off_and_said_once(tmp_path: Path) -> None:
    found = run_ranks(1, broken_writer, env={RUN_DIR: str(tmp_path)})
    assert found == [["recording is off from now on: ZeroDivisionError: division by zero"]]


def gone_wrappers() -> bool:
    """A pending step keeps no model alive."""
    import gc
    import weakref

    model = DDP(make_model())
    train(model, 2)
    parameter = weakref.ref(model.module[0].weight)
    gc.collect()
    gc.disable()
    del model
    return parameter() is None


def test_recording_keeps_no_model_alive(tmp_path: Path) -> None:
    env = {RUN_DIR: str(tmp_path)}
    assert run_ranks(1, gone_wrappers, env=env) == run_ranks(1, gone_wrappers, env={RUN_DIR: None})
