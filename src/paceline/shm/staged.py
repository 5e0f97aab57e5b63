"""Sums over several hosts of tensors that do not lie in the arena: copied in, reduced, copied out.

For the c10d backend, whose users bring their own tensors; DDP's buckets lie in the arena. Large
tensors go in pieces, and a piece that finds no room waits for an older one to be done. Every rank
cuts and waits alike, because the sizes are the same everywhere.
"""

from __future__ import annotations

import threading
from collections import deque

import torch

from paceline.shm.lanes import LaneGroup, LaneReduction

PIECE_BYTES = 16 << 20
HEAP_BYTES = 4 * PIECE_BYTES
"""What the arena of such a group needs."""


class Piece:
    """Part of a tensor on its way, in memory of the arena."""

    def __init__(
        self, target: torch.Tensor, scratch: torch.Tensor, reduction: LaneReduction
    ) -> None:
        self._target = target
        self._scratch: torch.Tensor | None = scratch
        self._lock = threading.Lock()
        self.reduction = reduction

    def finish(self) -> None:
        """Wait, and bring the sum to where it belongs. Once; from any thread."""
        with self._lock:
            if self._scratch is not None:
                self.reduction.wait()
                self._target.copy_(self._scratch)
                self._scratch = None
                self.reduction.forget()


class StagedReduction:
    """One sum, as c10d's ``Work`` sees it."""

    def __init__(self, tensor: torch.Tensor, flat: torch.Tensor, pieces: list[Piece]) -> None:
        self._tensor = tensor
        self._flat = flat
        self._pieces = pieces

    def wait(self, timeout_s: float = -1.0) -> None:
        """Block until the sum is in the tensor."""
        del timeout_s  # every step has a deadline of its own
        for piece in self._pieces:
            piece.finish()
        if self._flat.data_ptr() != self._tensor.data_ptr():
            self._tensor.copy_(self._flat.view(self._tensor.shape))

    def is_done(self) -> bool:
        """Never blocks."""
        return all(piece.reduction.is_done() for piece in self._pieces)


class Stage:
    """Where tensors are copied in and out."""

    def __init__(self, lanes: LaneGroup) -> None:
        self._lanes = lanes
        self._under_way: deque[Piece] = deque()

    def start(self, tensor: torch.Tensor) -> StagedReduction:
        """Begin to sum a dense CPU tensor over all ranks, in place."""
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        flat = real.contiguous().view(-1)
        pieces = [self._send(part) for part in flat.split(PIECE_BYTES // flat.itemsize)]
        return StagedReduction(real, flat, pieces)

    def _send(self, part: torch.Tensor) -> Piece:
        while (scratch := self._lanes.arena.allocate(part.numel(), part.dtype)) is None:
            self._under_way.popleft().finish()
        scratch.copy_(part)
        piece = Piece(part, scratch, self._lanes.all_reduce(scratch))
        self._under_way.append(piece)
        while self._under_way and self._under_way[0].reduction.is_done():
            self._under_way.popleft().finish()
        return piece
