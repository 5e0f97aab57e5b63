"""This rank's part of the shared memory: staging slots first, then a heap for buckets.

Called by the group. Peers map the whole arena when the group is made, so that memory handed out
later needs no further talk with them. Must not know about collectives.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import Any

import torch

from paceline.memory.segment import Mapping

ALIGNMENT_BYTES = 4096


def aligned(size_bytes: int) -> int:
    """Round up to whole pages of the system."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Block:
    """Memory of the heap; given back when nothing refers to it any more."""

    def __init__(self, arena: Arena, offset: int, size_bytes: int) -> None:
        self._arena = arena
        self._offset = offset
        self._size_bytes = size_bytes

    def __del__(self) -> None:
        self._arena._give_back(self._offset, self._size_bytes)


class Arena:
    """Hands out zeroed memory that all ranks of the host can reach.

    In a forked child it hands out nothing and takes nothing back: the memory is its parent's, and
    the lock may have been held by a thread that the child does not have.
    """

    def __init__(self, mapping: Mapping, heap_offset: int) -> None:
        self._mapping = mapping
        self._owner = os.getpid()
        self._lock = threading.Lock()
        # Sorted, never adjacent: (offset, bytes).
        self._free = [(heap_offset, mapping.size_bytes - heap_offset)]
        # Given back, not yet free: the collector may do so at any moment, also while this very
        # thread holds the lock.
        self._returned: deque[tuple[int, int]] = deque()
        self._is_retired = False

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return a flat tensor of zeros, or None if the heap has no room for it."""
        size_bytes = aligned(max(numel * dtype.itemsize, 1))
        offset = self._take(size_bytes)
        if offset is None:
            return None
        memory: Any = self._mapping.view(offset, max(numel * dtype.itemsize, dtype.itemsize))
        # An attribute of the object that the tensor's storage holds on to.
        memory.block = Block(self, offset, size_bytes)
        return torch.frombuffer(memory, dtype=dtype, count=max(numel, 1))[:numel]

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Say where a contiguous tensor lies in the arena, if it does."""
        if tensor.numel() == 0:
            return 0  # nowhere and everywhere
        offset = tensor.data_ptr() - self._mapping.address
        size_bytes = tensor.numel() * tensor.itemsize
        return offset if 0 <= offset <= self._mapping.size_bytes - size_bytes else None

    def retire(self) -> None:
        """Never hand memory out a second time: a stopped peer may still write to it."""
        self._is_retired = True

    def _take(self, size_bytes: int) -> int | None:
        if os.getpid() != self._owner:
            return None
        with self._lock:
            self._merge_returned()
            for index, (offset, free_bytes) in enumerate(self._free):
                if free_bytes >= size_bytes:
                    rest = (offset + size_bytes, free_bytes - size_bytes)
                    self._free[index : index + 1] = [rest] if rest[1] else []
                    return offset
        return None

    def _give_back(self, offset: int, size_bytes: int) -> None:
        if os.getpid() != self._owner:
            return
        self._mapping.discard(offset, size_bytes)
        if self._is_retired:
            return
        self._returned.append((offset, size_bytes))

    def _merge_returned(self) -> None:
        """Under the lock: make what was given back part of what is free."""
        while self._returned:
            merged: list[tuple[int, int]] = []
            for start, length in sorted([*self._free, self._returned.popleft()]):
                if merged and sum(merged[-1]) == start:
                    merged[-1] = (merged[-1][0], merged[-1][1] + length)
                else:
                    merged.append((start, length))
            self._free = merged
