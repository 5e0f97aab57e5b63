"""Sums of any tensor over several hosts: in pieces, through memory of the arena where need be.

Called by the transport of DDP, whose buckets lie in the arena as long as there is room, and by the
c10d backend, whose users bring their own tensors. A piece that does not lie in the arena is copied
to a buffer there, and back when it is done. Pieces are cut by size alone, so that ranks agree on
them even if a bucket found room on one rank and not on another.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque

import torch

from paceline.shm.collectives.cross_host import LaneGroup

PIECE_BYTES = 16 << 20
BUFFERS = 4
HEAP_BYTES = BUFFERS * PIECE_BYTES
"""What the buffers take of the arena."""


class Piece:
    """Part of a tensor on its way; ``target`` is where the sum is to be copied, if anywhere."""

    def __init__(self, shared: torch.Tensor, target: torch.Tensor | None, lanes: LaneGroup) -> None:
        if target is not None:
            shared.copy_(target)
        self._shared = shared
        self._target = target
        self._lock = threading.RLock()
        self._reduction = lanes.all_reduce(shared)

    def is_done(self) -> bool:
        """Never blocks."""
        return self._reduction.is_done()

    def done_ns(self) -> int:
        """When it ended; 0 before."""
        return self._reduction.done_ns()

    def finish(self, timeout_s: float = -1.0) -> None:
        """Wait, and bring the sum to where it belongs. From any thread."""
        self._reduction.wait(timeout_s)
        with self._lock:
            target, self._target = self._target, None
            if target is not None:
                target.copy_(self._shared)


class StagedReduction:
    """One sum."""

    def __init__(self, tensor: torch.Tensor, flat: torch.Tensor, pieces: list[Piece]) -> None:
        self._tensor = tensor
        self._flat: torch.Tensor | None = None if flat.data_ptr() == tensor.data_ptr() else flat
        self._pieces = pieces
        self._lock = threading.RLock()

    def wait(self, timeout_s: float = -1.0) -> None:
        """Block until the sum is in the tensor.

        Raises:
            CollectiveError: If it failed, or a piece did not end within ``timeout_s``.
        """
        for piece in self._pieces:
            piece.finish(timeout_s)
        with self._lock:
            if self._flat is not None:
                self._tensor.copy_(self._flat.view(self._tensor.shape))
            self._flat = None  # once: by now the tensor is its owner's again

    def is_done(self) -> bool:
        """Say whether the sum is in the tensor, or will never be. Never blocks."""
        if not all(piece.is_done() for piece in self._pieces):
            return False
        with contextlib.suppress(Exception):  # wait() raises it
            self.wait()
        return True

    def done_ns(self) -> int:
        """When the last piece ended."""
        return max((piece.done_ns() for piece in self._pieces), default=0)


class Stage:
    """Starts sums; has a few buffers for what lies elsewhere, used in turn."""

    def __init__(self, lanes: LaneGroup) -> None:
        self._lanes = lanes
        self._users: deque[Piece] = deque(maxlen=BUFFERS)
        # Address space, not memory: that is taken when a buffer is first used.
        found = [lanes.arena.allocate(PIECE_BYTES, torch.uint8) for _ in range(BUFFERS)]
        self._buffers = deque(buffer for buffer in found if buffer is not None)
        assert len(self._buffers) == BUFFERS

    def start(self, tensor: torch.Tensor) -> StagedReduction:
        """Begin to sum a dense CPU tensor over all ranks, in place."""
        dense = tensor.detach()  # may be a parameter
        real = torch.view_as_real(dense) if dense.is_complex() else dense
        flat = real.contiguous().view(-1)
        parts = flat.split(PIECE_BYTES // flat.itemsize) if flat.numel() else ()
        return StagedReduction(real, flat, [self._send(part) for part in parts])

    def _send(self, part: torch.Tensor) -> Piece:
        if self._lanes.arena.offset_of(part) is not None:
            return Piece(part, None, self._lanes)
        if len(self._users) == BUFFERS:
            self._users[0].finish()  # whose buffer is next
        buffer = self._buffers[0]
        self._buffers.rotate(-1)
        self._users.append(Piece(buffer[: part.nbytes].view(part.dtype), part, self._lanes))
        return self._users[-1]
