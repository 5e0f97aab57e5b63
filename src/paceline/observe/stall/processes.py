"""Processes of this host, as /proc shows them: alive, stopped or dead; no ptrace.

Called by the stall report and by ``paceline doctor``. Reads, and sends one signal to one thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import os
import platform
import signal
from pathlib import Path

HOST_ID_VARIABLE = "PACELINE_HOST_ID"
_TGKILL = {"x86_64": 234, "aarch64": 131, "riscv64": 131, "ppc64le": 250, "s390x": 241}


class ProcessState(enum.Enum):
    """What became of a process."""

    ALIVE = "alive"
    STOPPED = "stopped"
    """By a signal (SIGSTOP, Ctrl-Z) or a debugger."""

    DEAD = "dead"
    UNKNOWN = "unknown"
    """It is on another host, or in a container that cannot be looked into."""


def host_name() -> str:
    """What people call this host."""
    return os.environ.get(HOST_ID_VARIABLE) or platform.node()


def process_space() -> str:
    """Name what must be equal for a pid to mean the same process: the boot, and the namespace."""
    boot = os.environ.get(HOST_ID_VARIABLE) or _read(Path("/proc/sys/kernel/random/boot_id"))
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{boot}|{namespace}"


def start_ticks(pid: int) -> int:
    """When a process began, in ticks since the machine did; 0 if there is none."""
    fields = _stat(pid)
    return int(fields[19]) if len(fields) > 19 else 0


def process_state(pid: int, started: int) -> ProcessState:
    """Look at a process of this process space; its pid may belong to another one by now."""
    fields = _stat(pid)
    if len(fields) <= 19 or (started and int(fields[19]) != started):
        return ProcessState.DEAD
    return {
        "Z": ProcessState.DEAD,
        "X": ProcessState.DEAD,
        "T": ProcessState.STOPPED,
        "t": ProcessState.STOPPED,
    }.get(fields[0], ProcessState.ALIVE)


def cpu_ticks(pid: int) -> int:
    """CPU time of a process so far, in ticks; a rank that computes gains some."""
    fields = _stat(pid)
    return int(fields[11]) + int(fields[12]) if len(fields) > 12 else 0


def catches_signal(pid: int, signal_number: int) -> bool:
    """Say whether a process has a handler for a real-time signal: else it would die of it."""
    if not signal.SIGRTMIN <= signal_number <= signal.SIGRTMAX:  # others mean something else
        return False
    return "SigCgt" in _signal_sets(Path(f"/proc/{pid}/status"), signal_number)


def has_signal(pid: int, thread: int, signal_number: int) -> bool:
    """Say whether a signal waits for a thread, or its handler runs: it is blocked meanwhile."""
    found = _signal_sets(Path(f"/proc/{pid}/task/{thread}/status"), signal_number)
    return not found.isdisjoint({"SigPnd", "ShdPnd", "SigBlk"})


def signal_thread(pid: int, thread: int, signal_number: int) -> bool:
    """Send a signal to one thread of a process; say whether that was possible."""
    number = _TGKILL.get(platform.machine())
    if number is None:
        with contextlib.suppress(OSError):
            os.kill(pid, signal_number)
            return True
        return False
    return bool(ctypes.CDLL(None).syscall(number, pid, thread, signal_number) == 0)


def _signal_sets(status: Path, signal_number: int) -> set[str]:
    """The sets of a process or thread that a signal is in, by the names of their lines."""
    lines = [line.split() for line in _read(status).splitlines() if line.startswith(("Sig", "Shd"))]
    bit = 1 << (signal_number - 1)
    return {name.rstrip(":") for name, mask in lines if name != "SigQ:" and int(mask, 16) & bit}


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on."""
    return _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
