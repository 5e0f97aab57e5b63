"""What a stand-in tells a launcher that ends all ranks when one dies."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.elastic.supervised.outcome import OutcomeFile

KILLED = -signal.SIGKILL
RANK = """
import os, signal, sys, time
from pathlib import Path
from paceline.elastic.supervised.outcome import tell_stand_in
directory, *words = sys.argv[1:]
for word in words:
    if word == "join":
        tell_stand_in(Path(directory))
    elif word == "leave":
        tell_stand_in(None)
    elif word == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif word == "wait":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        print("ready", flush=True)
        time.sleep(1000)
    else:
        sys.exit(int(word))
"""


@contextlib.contextmanager
def started(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    script = folder / "rank.py"
    script.write_text(RANK)
    module = [sys.executable, "-m", "paceline.elastic.stand_in"]
    with subprocess.Popen(
        [*module, str(script), str(folder), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def run(folder: Path, *words: str) -> Any:
    with started(folder, *words) as process:
        return process.wait(60)


def test_a_rank_that_is_in_no_job_ends_as_it_would_without(tmp_path: Path) -> None:
    assert run(tmp_path, "0") == 0
    assert run(tmp_path, "3") == 3
    assert run(tmp_path, "die") == KILLED


def test_what_runs_nothing_says_how_it_is_used() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "paceline.elastic.stand_in"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "stand_in [-m MODULE | SCRIPT]" in done.stderr


@pytest.mark.parametrize(("is_well", "code"), [(True, 0), (False, KILLED)])
def test_a_rank_that_dies_in_a_job_is_waited_for(tmp_path: Path, is_well: bool, code: int) -> None:
    outcome = OutcomeFile(tmp_path)
    with started(tmp_path, "join", "die") as process:
        assert process.stderr is not None
        assert "killed by SIGKILL; the other ranks may go on" in process.stderr.readline()
        assert process.poll() is None
        (tmp_path / "outcome").unlink()  # as with its directory
        outcome.close(is_well=is_well)
        assert process.wait(60) == code


def test_a_supervisor_that_is_killed_is_no_good_end(tmp_path: Path) -> None:
    outcome = OutcomeFile(tmp_path)
    with started(tmp_path, "join", "3") as process:
        assert process.stderr is not None
        process.stderr.readline()
        os.close(outcome._file)
        assert process.wait(60) == 3


def test_a_failure_after_the_job_is_told_at_once(tmp_path: Path) -> None:
    outcome = OutcomeFile(tmp_path)
    assert run(tmp_path, "join", "leave", "3") == 3
    outcome.close(is_well=True)


def test_signals_go_on_to_the_rank(tmp_path: Path) -> None:
    with started(tmp_path, "wait") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.terminate()
        assert process.wait(60) == 7


def test_a_stand_in_that_is_killed_takes_its_rank_with_it(tmp_path: Path) -> None:
    with started(tmp_path, "wait") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
        assert process.stdout.read() == ""  # its end comes when nobody has it open any more


def test_told_to_end_while_it_waits_for_the_others(tmp_path: Path) -> None:
    outcome = OutcomeFile(tmp_path)
    with started(tmp_path, "join", "die") as process:
        assert process.stderr is not None
        process.stderr.readline()
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM
    outcome.close(is_well=True)
