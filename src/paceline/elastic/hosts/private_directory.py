"""The directory of a launcher, which only this user can enter: sockets, key, stores of one host.

Made by :mod:`paceline.elastic.hosts.agent`. A launcher that is killed leaves its own behind, with
the key in it: the process that keeps the job's stores removes it. If that is killed, too, the next
launcher of this user does.

[Note: whose directory is left]
A launcher holds a lock on a file of its directory as long as it lives: the kernel takes it away
with the process. The file gets its name only when it is locked, so a directory that is being made
is not taken for one that was left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

_PREFIX = "paceline-elastic-"
_LOCK = "owner"
_TRIES = 100
_SOCKET_PATH_BYTES = 108  # <sys/un.h>
_NAME_BYTES = 32  # what mkdtemp adds, and the name of a socket


class PrivateDirectory:
    """See the module.

    Attributes:
        path: The directory.
    """

    def __init__(self) -> None:
        where = _parent()
        _remove_all_left(where)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=where))
        draft = self.path / f"{_LOCK}.new"
        self._lock = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        draft.rename(self.path / _LOCK)

    def close(self) -> None:
        """Remove it. Idempotent."""
        _remove(self.path)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _parent() -> Path:
    """The temporary folder; ``/tmp`` if that is too deep for sockets."""
    where = Path(tempfile.gettempdir())
    longest = len(os.fsencode(where / _PREFIX)) + _NAME_BYTES
    return where if longest < _SOCKET_PATH_BYTES else Path("/tmp")


def remove_left(path: Path) -> None:
    """Remove the directory of a launcher that was killed, or is ending just now."""
    if not path.name.startswith(_PREFIX):
        return
    for _ in range(_TRIES):
        try:
            if _is_left(path):
                _remove(path)
            return
        except BlockingIOError:
            time.sleep(0.01)
        except OSError:  # it is gone
            return


def _remove_all_left(where: Path) -> None:
    """Remove what launchers of this user have left: [Note: whose directory is left]."""
    for path in where.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if status.st_uid == os.geteuid() and not path.is_symlink() and _is_left(path):
                _remove(path)


def _remove(path: Path) -> None:
    """Also if a rank that ends just now makes a file in it, as the end of a FileStore may."""
    for _ in range(_TRIES):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
        time.sleep(0.01)


def _is_left(path: Path) -> bool:
    """Raises OSError if it is not, or gone."""
    lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(lock)
    return True
