"""Ranks of one host, sharing memory: segments, the native core, collectives, the c10d backend.

Start with :mod:`paceline.shm.collectives.group`. How ranks find each other is in
:mod:`paceline.shm.attach.connect`, the bytes they share in ``native/group/layout.h``, the proof in
``docs/protocol.md``.
"""

from paceline.shm.attach.connect import SharingRefusal, connect
from paceline.shm.attach.connection import Connection
from paceline.shm.collectives.group import ASYNC, BLOCKING, Call, SharedGroup
from paceline.shm.collectives.pending import Pending

__all__ = [
    "ASYNC",
    "BLOCKING",
    "Call",
    "Connection",
    "Pending",
    "SharedGroup",
    "SharingRefusal",
    "connect",
]
