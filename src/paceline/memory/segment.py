"""A segment: one piece of anonymous shared memory (a memfd), mapped into this process.

Nothing appears in the file system, so there is nothing to clean up: the memory is gone when the
last process that maps it is. Its size is sealed, so that no peer can take memory away under a
reader. Called by :mod:`paceline.shm` and :mod:`paceline.ps`. Must not know what lies in it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
from typing import Any

from paceline.native.extension import native

# <fcntl.h>; Python has these names from 3.9 on, but not everywhere.
_F_ADD_SEALS = 1033
_F_GET_SEALS = 1034
_F_SEAL_SEAL = 0x0001
_F_SEAL_SHRINK = 0x0002
_F_SEAL_GROW = 0x0004


def create_segment(name: str, size_bytes: int) -> int:
    """Make a segment of zeros and return its descriptor. Memory is taken as it is touched.

    Raises:
        OSError: If the system has no memfd, or a limit is too low.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size_bytes)
        fcntl.fcntl(descriptor, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_segment(descriptor: int, size_bytes: int) -> None:
    """See that a descriptor from a peer is a segment of that size, before it is mapped.

    Raises:
        ValueError: If it is something else.
    """
    found = os.fstat(descriptor).st_size
    if found != size_bytes:
        raise ValueError(f"a peer's segment has {found} bytes instead of {size_bytes}")
    if not fcntl.fcntl(descriptor, _F_GET_SEALS) & _F_SEAL_SHRINK:
        raise ValueError("a peer's segment could be shrunk under its readers")


class Mapping:
    """A segment in this process's address space; unmapped when nothing refers to it any more.

    Tensors made from :meth:`view` keep it alive, so a gradient outlives its group. A forked child
    has private memory in its place ([Note: forks] in ``native/group/mapping.c``).

    Args:
        descriptor: Of the segment; the caller's to close.
        size_bytes: Of all of it.
        keeps_copy: What a forked child finds there: what was in it, or zeros.
    """

    def __init__(self, descriptor: int, size_bytes: int, *, keeps_copy: bool = False) -> None:
        self._map = native.Mapping(descriptor, size_bytes, keeps_copy)
        self.size_bytes = size_bytes
        self.address = int(self._map.address())

    def view(self, offset: int, size_bytes: int) -> ctypes.Array[ctypes.c_ubyte]:
        """Return part of the memory as an object that keeps the mapping alive."""
        if not 0 <= offset <= self.size_bytes - size_bytes:
            raise ValueError(f"{size_bytes} bytes from {offset} on are not in the mapping")
        memory: Any = (ctypes.c_ubyte * size_bytes).from_address(self.address + offset)
        memory.mapping = self._map
        return memory  # type: ignore[no-any-return]

    def discard(self, offset: int, size_bytes: int) -> None:
        """Give memory back to the system; it reads as zeros afterwards. Not in a forked child."""
        self._map.discard(offset, size_bytes)
