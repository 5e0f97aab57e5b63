"""Files and sockets that only this user can open, whatever the umask. Called by a server."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def private_umask() -> Iterator[None]:
    """What is made inside is for this user only. The umask is the whole process's."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def listen_privately(path: Path, backlog: int) -> socket.socket:
    """Listen at a Unix socket of mode 0600; it never had another. Replaces what is there.

    Raises:
        OSError: It cannot be made.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with private_umask():
            path.unlink(missing_ok=True)
            listener.bind(os.fspath(path))
        path.chmod(0o600)
        listener.listen(backlog)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener
