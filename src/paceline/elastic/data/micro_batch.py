"""The pieces of a rank's share of a global batch, one after the other: ``state.micro_batch()``.

Used by :mod:`paceline.elastic.state`; sizes are the cursor's
([Note: shares and micro-batches] in cursor.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from paceline.ddp import DistributedDataParallel
from paceline.elastic.data.cursor import BatchCursor
from paceline.errors import ConfigurationError


@dataclass(frozen=True)
class MicroBatch:
    """A piece of a share.

    Attributes:
        samples: In this piece; 0: its batch holds a sample that counts nothing.
        share: Samples in all pieces of this rank.
        is_last: The global batch is complete after it: step and commit.
    """

    samples: int
    share: int
    is_last: bool

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return what to call ``backward`` on: the mean loss of this piece, for what it counts."""
        if self.samples == self.share:  # also a rank without samples, whose step weighs nothing
            return loss
        return loss * (self.samples / self.share)


class Pieces:
    """Counts the pieces of the present global batch.

    Attributes:
        done: How many were trained on; set it to 0 when another global batch begins.
    """

    def __init__(self) -> None:
        self.done = 0

    @contextlib.contextmanager
    def next(
        self, cursor: BatchCursor, wrappers: Sequence[DistributedDataParallel]
    ) -> Iterator[MicroBatch]:
        """Train on the next piece: gradients are reduced with the last."""
        pieces, number = cursor.pieces(cursor.next_size()), self.done
        if number >= len(pieces):
            raise ConfigurationError(
                f"all {len(pieces)} micro-batches of this global batch are done: step and call "
                "state.commit() when micro.is_last"
            )
        is_last = number == len(pieces) - 1
        with contextlib.ExitStack() as stack:
            for wrapper in () if is_last else wrappers:
                stack.enter_context(wrapper.no_sync())
            yield MicroBatch(len(pieces[number]), sum(map(len, pieces)), is_last)
        self.done = number + 1

    def check_complete(self, cursor: BatchCursor) -> None:
        """Refuse to commit a part of a global batch."""
        if cursor.micro_batch is None:
            return
        count = cursor.count_pieces(cursor.next_size())
        if self.done not in (0, count) or (count > 1 and not self.done):
            raise ConfigurationError(
                f"{self.done} of {count} micro-batches of this global batch are done: train under "
                "`with state.micro_batch() as micro:`, and step and commit when micro.is_last"
            )
