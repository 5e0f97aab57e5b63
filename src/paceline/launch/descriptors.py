"""Descriptors that the launcher needs: pipes and sockets of every rank.

Used by ``job.py``. Many systems allow 1024 unless a process asks for more, and 256 ranks need that.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

from paceline.errors import ConfigurationError

_PER_RANK = 4  # its stdout and stderr, what it says of its end, and what the fork server says of it
_PASSED = 16  # while one is started, and for a replacement
_OWN = 64


@contextlib.contextmanager
def descriptors_for(ranks: int) -> Iterator[None]:
    """Have this process be allowed as many as it takes to hold so many ranks; then as before.

    Raises:
        ConfigurationError: The system does not allow it.
    """
    wanted = _in_use() + _PER_RANK * ranks + _PASSED + _OWN
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        yield
        return
    if soft < ranks + _OWN:  # ranks have the limit of the fork server: it is not raised there
        raise ConfigurationError(
            f"{ranks} ranks need {ranks + _OWN} descriptors in the process that they are forked "
            f"from, and it may have {soft}: start fewer ranks, or raise the limit (ulimit -n)"
        )
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise ConfigurationError(
            f"{ranks} ranks need {wanted} descriptors in the launcher, and it may have {hard}: "
            "start fewer ranks, or raise the limit (ulimit -Hn)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _in_use() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0
