"""What a rank tells the others about its process: enough to see later whether it still lives.

Pure except for :func:`describe_process` and the functions that read /proc. Opens nothing that
stays open.
"""

from __future__ import annotations

import os
import platform
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HOST_ID_VARIABLE = "PACELINE_HOST_ID"


@dataclass(frozen=True)
class Identity:
    """One rank's process. Travels as JSON.

    Attributes:
        rank: In the group.
        host: Equal for processes that see each other's pids.
        hostname: For people.
        pid: In its PID namespace, which is part of ``host``.
        started: When the process began, in ticks since the machine did: with the pid it names one
            process for good.
    """

    rank: int
    host: str
    hostname: str
    pid: int
    started: int

    def to_json(self) -> dict[str, Any]:
        """Return what :meth:`from_json` takes."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any, rank: int) -> Identity:
        """Check what a peer sent.

        Raises:
            ValueError: If it is no identity, or that of another rank.
        """
        try:
            found = cls(
                int(value["rank"]),
                str(value["host"]),
                str(value["hostname"]),
                int(value["pid"]),
                int(value["started"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"rank {rank} sent no description of itself: {value!r}") from error
        if found.rank != rank:
            raise ValueError(f"rank {rank} says that it is rank {found.rank}")
        return found

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.hostname})"


def describe_process(rank: int) -> Identity:
    """Say who and where this process is."""
    return Identity(rank, host_key(), hostname(), os.getpid(), start_time(os.getpid()))


def hostname() -> str:
    """What people call this host."""
    return os.environ.get(HOST_ID_VARIABLE) or platform.node()


def host_key() -> str:
    """Name what must be equal for two processes to map each other's memory.

    The same boot of the same kernel, the same user, and namespaces in which the other's socket and
    process can be seen. ``PACELINE_HOST_ID`` stands in for the boot.
    """
    boot = os.environ.get(HOST_ID_VARIABLE) or _read("/proc/sys/kernel/random/boot_id")
    if not boot:
        boot = secrets.token_hex(16)  # nobody is on the same host as this rank
    namespaces = (_link("/proc/self/ns/net"), _link("/proc/self/ns/pid"))
    return "|".join((boot, str(os.geteuid()), *namespaces))


def start_time(pid: int) -> int:
    """When a process began, in ticks since the machine did; 0 if there is none."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return int(fields[19]) if len(fields) > 19 else 0


def open_pidfd(process: Identity) -> int | None:
    """Return a descriptor that tells when a process of this host ends; None if it has ended.

    Raises:
        OSError: If this process has no descriptor left.
    """
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    # The pid may have been given to another process since.
    if start_time(process.pid) != process.started:
        os.close(descriptor)
        return None
    return descriptor


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
