"""Imported by a fork server in tests: as if the system had no process left."""

import errno
import os


def _refuse() -> int:
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


os.fork = _refuse
