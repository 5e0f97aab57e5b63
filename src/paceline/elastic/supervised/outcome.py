"""How a supervised job ended, for those who outlive it: a file that its supervisor holds a lock on.

Written by :mod:`paceline.elastic.supervised.supervisor`; ranks hand it to their stand-ins
(:mod:`paceline.elastic.stand_in`). The kernel takes the lock away with the supervisor, however that
ends, and who has the file open can read it although its directory is gone. Must not import torch.
"""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

STAND_IN = "PACELINE_ELASTIC_STAND_IN"
"""The environment variable with a rank's stand-in: its process, and the rank's end of a socket."""
JOB = b"job"  # comes with the file
_OVER = b"over"
_NAME = "outcome"
_WELL = b"well"


class OutcomeFile:
    """The supervisor's end."""

    def __init__(self, directory: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._file = os.open(directory / _NAME, flags, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def close(self, *, is_well: bool) -> None:
        """Say how the job ended."""
        if is_well:
            os.write(self._file, _WELL)
        os.close(self._file)


def tell_stand_in(directory: Path | None) -> None:
    """Tell this rank's stand-in, if it has one, of the job that it is in; None: no more."""
    pid, _, number = os.environ.get(STAND_IN, "").partition(":")
    if pid != str(os.getppid()):
        return  # nobody's, or that of the process which has started this one
    with socket.socket(fileno=os.dup(int(number))) as stand_in:
        if directory is None:
            stand_in.send(_OVER)
            return
        file = os.open(directory / _NAME, os.O_RDONLY | os.O_CLOEXEC)
        try:
            socket.send_fds(stand_in, [JOB], [file])
        finally:
            os.close(file)


def wait_outcome(file: int) -> bool:
    """Wait until the supervisor has ended; return whether the job ended well."""
    fcntl.flock(file, fcntl.LOCK_SH)
    return os.read(file, len(_WELL)) == _WELL
