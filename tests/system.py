"""What tests ask of the system: whether processes run, and which ports are free."""

from __future__ import annotations

import socket
import time

from paceline.processes import ProcessState, process_state

DEADLINE_S = 60.0
"""Only ends a hang."""


def is_running(pid: int) -> bool:
    """Say whether a process exists and is no zombie."""
    return process_state(pid) is not ProcessState.DEAD


def wait_gone(*pids: int) -> None:
    """Wait until none of these processes runs."""
    until_s = time.monotonic() + DEADLINE_S
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < until_s, f"processes {left} live on"
        time.sleep(0.01)


def free_port() -> int:
    """A port at the loopback address that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
