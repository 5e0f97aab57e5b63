"""Memory that a trainer and a server of one host share, and the words in which it is handed over.

Called by both ends: ``ps/server/shm_listener.py`` (server) and ``ps/client/shm_link.py`` (trainer).
How messages lie in that memory is in ``native/ps/ring.h``.
"""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path
from typing import Any, NamedTuple

from paceline.memory.segment import check_segment, create_segment
from paceline.native.extension import DISABLE_VARIABLE, native
from paceline.ps.protocol.settings import IPC

CAPACITY = 1 << 20
"""Bytes of each of the two rings. A message takes at most half of one."""
GREETING = struct.Struct("<8s16s")
"""What a trainer says first: ``MAGIC``, and its client id."""
OFFER = struct.Struct("<8sQ16s")
"""What it gets, with three descriptors (memory, server's event, own event): magic, capacity, and
the incarnation of the server, as WELCOME tells it."""
MAGIC = b"PLring1\0"


class RingDescriptors(NamedTuple):
    """The descriptors of one pair of rings."""

    memory: int
    server_event: int
    trainer_event: int


def is_possible() -> bool:
    """Say whether this process can share memory with another."""
    is_wanted = os.environ.get(DISABLE_VARIABLE, "") in ("", "0")
    return native is not None and sys.platform == "linux" and is_wanted


def shm_listener_path(address: str) -> Path | None:
    """Where a server at this address hands out memory; None if it has no such place."""
    path = address.removeprefix(IPC)
    if path == address or path.startswith("@"):  # another host's, perhaps; a socket without a file
        return None
    return Path(path + ".listener")


def make_memory() -> int:
    """Memory for two rings. Sealed: nobody can make it smaller under somebody else's feet."""
    return create_segment("paceline-ps", native.DATA_OFFSET + 2 * CAPACITY)


def pair_over(handed: RingDescriptors, capacity: int, is_server: bool) -> Any:
    """One end of the rings in this memory.

    Raises:
        ValueError: It is something else, or could shrink under its readers.
        OSError: It cannot be mapped.
    """
    check_segment(handed.memory, native.DATA_OFFSET + 2 * capacity)
    ours, theirs = handed.trainer_event, handed.server_event
    if is_server:
        ours, theirs = theirs, ours
    return native.Pair(handed.memory, capacity, ours, theirs, is_server)
