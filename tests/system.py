"""What tests ask of the system: whether processes run, which ports are free, a cgroup."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

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


@contextlib.contextmanager
def cpu_cgroup(quota_us: int, period_us: int) -> Iterator[Path]:
    """A cgroup with a CPU quota, of either version: write pids into its ``cgroup.procs``."""
    root = Path("/sys/fs/cgroup")
    is_v1 = (root / "cpu" / "cpu.cfs_quota_us").exists()
    group = (root / "cpu" if is_v1 else root) / f"paceline-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made in {group.parent}: {error.strerror}")
    try:
        if is_v1:
            (group / "cpu.cfs_period_us").write_text(str(period_us))
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        elif (group / "cpu.max").exists():
            (group / "cpu.max").write_text(f"{quota_us} {period_us}")
        else:
            pytest.skip("cgroup.subtree_control hands on no cpu controller")
        yield group
    finally:
        until_s = time.monotonic() + DEADLINE_S
        while (group / "cgroup.procs").read_text() and time.monotonic() < until_s:
            time.sleep(0.01)  # what was in it has ended, and is not yet gone
        group.rmdir()
