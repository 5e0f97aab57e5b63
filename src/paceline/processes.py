"""Processes of this host, as /proc shows them: alive, stopped or dead, since when; no ptrace.

Called wherever a rank, a launcher or a command asks what became of a process. Reads, and sends one
signal to one thread. Must not import torch.
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


def boot_id() -> str:
    """Name this boot of the kernel; ``PACELINE_HOST_ID`` stands in for it. May be empty."""
    return os.environ.get(HOST_ID_VARIABLE) or _read("/proc/sys/kernel/random/boot_id")


def namespace_id(kind: str) -> str:
    """Name a namespace of this process: ``pid``, ``net``; empty if the system does not say."""
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


def process_space() -> str:
    """Name what must be equal for a pid to mean the same process: the boot, and the namespace."""
    return f"{boot_id()}|{namespace_id('pid')}"


def start_ticks(pid: int) -> int:
    """When a process began, in ticks since the machine did; 0 if there is none."""
    fields = _stat(pid)
    return int(fields[19]) if len(fields) > 19 else 0


def state_letter(pid: int) -> str:
    """The kernel's letter for a process: R, S, T (stopped), t (by a debugger), Z; empty: none."""
    return (_stat(pid) or [""])[0]


def process_state(pid: int, started: int = 0) -> ProcessState:
    """Look at a process of this process space; with ``started``, at no later one of this pid."""
    fields = _stat(pid)
    if len(fields) <= 19 or (started and int(fields[19]) != started):
        return ProcessState.DEAD
    return {
        "Z": ProcessState.DEAD,
        "X": ProcessState.DEAD,
        "T": ProcessState.STOPPED,
        "t": ProcessState.STOPPED,
    }.get(fields[0], ProcessState.ALIVE)


def open_pidfd(pid: int, started: int) -> int | None:
    """Return a descriptor that is readable once a process has ended; None if it has.

    Raises:
        OSError: This process has no descriptor left, or the system has no pidfds.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    if start_ticks(pid) != started:  # the pid has been given to another process since
        os.close(descriptor)
        return None
    return descriptor


def cpu_ticks(pid: int) -> int:
    """CPU time of a process so far, in ticks; a rank that computes gains some."""
    fields = _stat(pid)
    return int(fields[11]) + int(fields[12]) if len(fields) > 12 else 0


def catches_signal(pid: int, signal_number: int) -> bool:
    """Say whether a process has a handler for a real-time signal: else it would die of it."""
    if not signal.SIGRTMIN <= signal_number <= signal.SIGRTMAX:  # others mean something else
        return False
    return "SigCgt" in _signal_sets(f"/proc/{pid}/status", signal_number)


def has_signal(pid: int, thread: int, signal_number: int) -> bool:
    """Say whether a signal waits for a thread, or its handler runs: it is blocked meanwhile."""
    found = _signal_sets(f"/proc/{pid}/task/{thread}/status", signal_number)
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


def _signal_sets(status: str, signal_number: int) -> set[str]:
    """The sets of a process or thread that a signal is in, by the names of their lines."""
    lines = [line.split() for line in _read(status).splitlines() if line.startswith(("Sig", "Shd"))]
    bit = 1 << (signal_number - 1)
    return {name.rstrip(":") for name, mask in lines if name != "SigQ:" and int(mask, 16) & bit}


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on."""
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""
