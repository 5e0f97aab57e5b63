"""Sums of any tensor over several hosts: in chunks, through memory of the arena where need be.

Called by the transport of DDP, whose buckets lie in the arena as long as there is room, and by the
c10d backend, whose users bring their own tensors. A chunk that does not lie in the arena is copied
to a buffer there, and back when it is done. Chunks are cut by size alone, so that ranks agree on
them even if a bucket found room on one rank and not on another.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque

import torch

from paceline.shm.collectives.cross_host import CrossHostGroup, CrossHostReduction

CHUNK_BYTES = 16 << 20
BUFFERS = 4
HEAP_BYTES = BUFFERS * CHUNK_BYTES
"""What the buffers take of the arena."""


class ChunkedReduction:
    """One sum; see :class:`~paceline.shm.collectives.pending.InFlight`."""

    def __init__(
        self, tensor: torch.Tensor, flat: torch.Tensor, chunks: list[CrossHostReduction]
    ) -> None:
        self._tensor = tensor
        self._flat: torch.Tensor | None = None if flat.data_ptr() == tensor.data_ptr() else flat
        self._chunks = chunks
        self._lock = threading.RLock()

    def wait(self, timeout_s: float = -1.0) -> None:
        """Block until the sum is in the tensor; ``timeout_s`` is for each chunk."""
        for chunk in self._chunks:
            chunk.wait(timeout_s)
        with self._lock:
            if self._flat is not None:
                self._tensor.copy_(self._flat.view(self._tensor.shape))
            self._flat = None  # once: by now the tensor is its owner's again

    def is_done(self) -> bool:
        """Never blocks."""
        return all(chunk.is_done() for chunk in self._chunks)

    def try_finish(self) -> bool:
        """Copy the sum to the tensor, if it is there; say whether it is, or will never be."""
        if not self.is_done():
            return False
        with contextlib.suppress(Exception):  # wait() raises it
            self.wait()
        return True

    def done_ns(self) -> int:
        """When the last chunk ended."""
        return max((chunk.done_ns() for chunk in self._chunks), default=0)


class ChunkedReducer:
    """Starts sums; has a few buffers for what lies elsewhere, used in turn."""

    def __init__(self, group: CrossHostGroup) -> None:
        self._group = group
        self._users: deque[CrossHostReduction] = deque(maxlen=BUFFERS)
        # Address space, not memory: that is taken when a buffer is first used.
        found = [group.arena.allocate(CHUNK_BYTES, torch.uint8) for _ in range(BUFFERS)]
        self._buffers = deque(buffer for buffer in found if buffer is not None)
        assert len(self._buffers) == BUFFERS

    def start(self, tensor: torch.Tensor) -> ChunkedReduction:
        """Begin to sum a dense CPU tensor over all ranks, in place."""
        dense = tensor.detach()  # may be a parameter
        real = torch.view_as_real(dense) if dense.is_complex() else dense
        flat = real.contiguous().view(-1)
        chunks = flat.split(CHUNK_BYTES // flat.itemsize) if flat.numel() else ()
        return ChunkedReduction(real, flat, [self._start_one(chunk) for chunk in chunks])

    def _start_one(self, chunk: torch.Tensor) -> CrossHostReduction:
        if self._group.arena.offset_of(chunk) is not None:
            return self._group.all_reduce(chunk)
        if len(self._users) == BUFFERS:
            self._users[0].wait()  # whose buffer is next
        buffer = self._buffers[0][: chunk.nbytes].view(chunk.dtype)
        self._buffers.rotate(-1)
        self._users.append(self._group.all_reduce(buffer, copy_of=chunk))
        return self._users[-1]
