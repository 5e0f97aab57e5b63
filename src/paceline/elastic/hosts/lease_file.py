"""Until when the ranks of a host may go on: written by its launcher, read by each rank.

The rank's part of [Note: leases]: it ends by itself if its launcher cannot end it. On a host
without a lease (the coordinator's own) there is no file.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from paceline.elastic.hosts.lease import BEATS, now_s

_RECORD = struct.Struct("=dd")  # until when, and how much later a rank sees to it itself


def write_lease(path: Path, until_s: float, lease_s: float) -> None:
    """Say how long ranks may go on."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(descriptor, _RECORD.pack(until_s, lease_s / BEATS), 0)
    finally:
        os.close(descriptor)


class LeaseReader:
    """A rank's view."""

    def __init__(self, path: Path) -> None:
        self._file: int | None = None
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return

    @property
    def is_leased(self) -> bool:
        """Whether there is anything to watch."""
        return self._file is not None

    def left_s(self) -> float:
        """Seconds until this process ends itself, if nothing changes."""
        if self._file is None:
            return float("inf")
        data = os.pread(self._file, _RECORD.size, 0)
        if len(data) < _RECORD.size:
            return float("inf")
        until_s, later_s = _RECORD.unpack(data)
        return float(until_s + later_s - now_s())

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
