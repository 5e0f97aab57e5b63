"""What /proc says about processes of this host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from paceline.processes import (
    ProcessState,
    cpu_ticks,
    open_pidfd,
    process_state,
    start_ticks,
    state_letter,
)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def test_a_process_is_alive_then_stopped_then_dead(child: subprocess.Popen[bytes]) -> None:
    started = start_ticks(child.pid)
    assert started > 0
    assert process_state(child.pid, started) is ProcessState.ALIVE
    assert process_state(child.pid) is ProcessState.ALIVE
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert process_state(child.pid, started) is ProcessState.STOPPED
    assert state_letter(child.pid) == "T"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_state(child.pid, started) is ProcessState.DEAD, "a zombie is dead"
    child.wait()
    assert process_state(child.pid, started) is ProcessState.DEAD
    assert (state_letter(child.pid), start_ticks(child.pid), cpu_ticks(child.pid)) == ("", 0, 0)
    assert open_pidfd(child.pid, started) is None


def test_a_pid_that_was_given_away_is_not_taken_for_the_process(
    child: subprocess.Popen[bytes],
) -> None:
    started = start_ticks(child.pid)
    descriptor = open_pidfd(child.pid, started)
    assert descriptor is not None
    os.close(descriptor)
    assert open_pidfd(child.pid, started + 1) is None
    assert process_state(child.pid, started + 1) is ProcessState.DEAD


@pytest.mark.parametrize("pid", [0, -1, 10**12])
def test_what_is_no_process_is_dead(pid: int) -> None:
    assert process_state(pid) is ProcessState.DEAD
