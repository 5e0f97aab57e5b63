"""Descriptors handed over a Unix socket, between processes of one user.

Called by :mod:`paceline.shm.attach.fd_exchange` (ranks of a host), by both ends of the shared
memory of :mod:`paceline.ps`, by :mod:`paceline.launch.server_process`, and by
:mod:`paceline.elastic.stand_in`. What is sent with them is the caller's. Must not import torch.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterable

_CREDENTIALS = struct.Struct("3i")


def is_same_user(connection: socket.socket) -> bool:
    """Say whether the process at the other end is of this user; the kernel knows."""
    size = _CREDENTIALS.size
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())


def receive(connection: socket.socket, size_bytes: int, limit: int) -> tuple[bytes, list[int]]:
    """Receive up to ``size_bytes``, and up to ``limit`` descriptors, which the caller then owns.

    Raises:
        OSError: If this process may not have as many descriptors; none is left open.
    """
    data, descriptors, flags, _ = socket.recv_fds(connection, size_bytes, limit)
    if flags & socket.MSG_CTRUNC:
        close_all(descriptors)
        raise OSError(errno.EMFILE, "too few descriptors are allowed (ulimit -n)")
    return data, descriptors


def close_all(descriptors: Iterable[int]) -> None:
    """Close all of them."""
    for descriptor in descriptors:
        os.close(descriptor)
