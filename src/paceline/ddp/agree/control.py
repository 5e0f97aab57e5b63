"""The control block: what ranks tell each other in every step, at no extra collective.

[Note: the control block]
Behind the gradients of the bucket that is reduced last lies a trailer of a few numbers. It is
summed with the gradients, yet carries words that are no gradients:

    rows   world x row_bytes numbers. Each rank writes one *row of bytes* into its own row and zeros
           into all others, so the sum is the set of all rows, unchanged. A byte is at most 255, and
           integers up to 256 are exact in every dtype that gradients have, bfloat16 included.
    used   with unused-parameter tracking: one number per parameter, 1 if this rank used it. Summed
           it counts the ranks; where a dtype is too coarse to count, it still tells zero from more.

Why the last bucket: buckets start in plan order, so when a rank starts its last one, it knows all
that it will ever know about this step: which gradients never came, which were not finite. Where
the last bucket cannot carry a trailer (a sparse gradient, or a communication hook that owns the
bucket), the block travels alone, after all buckets.

A row that is all zeros belongs to a rank that has left the loop (``join``).
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from paceline.ddp.agree.byte_sum import read_bytes, write_bytes

_HEADER = struct.Struct("<BIId")
_DIGEST = struct.Struct("<Q")
_MAX_U32 = (1 << 32) - 1


class Flag(enum.IntFlag):
    """What a rank has to say about its step."""

    PRESENT = 1
    """Set in every row that was written: the rank is not joined."""

    WEIGHTED = 2
    """The rank is inside ``ddp.weighted(n)``."""

    FAILED = 4
    """The step failed here; a report follows in :mod:`paceline.ddp.agree.diagnosis`."""

    NONFINITE = 8
    """A gradient of this rank is not finite (only with nonfinite="skip")."""


_ORDINARY = Flag.PRESENT.value


class ControlRow(NamedTuple):
    """One rank's row.

    ``ready_us`` says for each bucket when it was ready, in microseconds since this rank saw the
    previous step end: an instant that all ranks share to within one collective, so that no clocks
    need to be compared. It is empty in a row that was read: see :meth:`ControlBlock.last_rank`.

    ``drift`` is what this rank did since its last synchronised backward, as far as ranks compare
    it: :meth:`paceline.ddp.agree.drift.Tally.code`.

    ``digest`` stands for its parameters (:mod:`paceline.ddp.agree.replicas`); 0 in a step, or with
    a layout, that does not compare them.
    """

    flags: int
    step: int
    weight: float
    ready_us: tuple[int, ...] = ()
    drift: int = 0
    digest: int = 0

    def has(self, flag: Flag) -> bool:
        """Whether this rank raised ``flag``."""
        return bool(self.flags & flag.value)


@dataclass(frozen=True)
class ControlBlock:
    """All rows after the sum; None where a rank has joined. ``used`` is empty without tracking."""

    rows: tuple[ControlRow | None, ...]
    used: tuple[int, ...]
    layout: ControlLayout
    data: bytes

    def present(self) -> list[tuple[int, ControlRow]]:
        """The rows of ranks that take part, with their ranks."""
        return [(rank, row) for rank, row in enumerate(self.rows) if row is not None]

    def is_ordinary(self) -> bool:
        """Whether no rank has anything to say, and all are in the same step: the common case."""
        rows = [row for row in self.rows if row is not None]
        if not rows:
            return True
        step, drift, digest = rows[0].step, rows[0].drift, rows[0].digest
        return all(
            r.flags == _ORDINARY and r.step == step and r.drift == drift and r.digest == digest
            for r in rows
        )

    def any(self, flag: Flag) -> bool:
        """Whether some rank raised ``flag``."""
        return any(row.has(flag) for _, row in self.present())

    def last_rank(self, bucket: int) -> int:
        """The rank on which a bucket was ready last; -1 if nobody can say."""
        if bucket >= self.layout.buckets:
            return -1
        late = [(self.layout.ready_us(self.data, rank)[bucket], rank) for rank, _ in self.present()]
        return max(late)[1] if late else -1


class ControlLayout:
    """How many numbers a block has, and how it is written and read.

    Attributes:
        row_bytes: Bytes in one rank's row.
        numel: Numbers in a block.
    """

    def __init__(
        self, world: int, buckets: int, tracked: int = 0, *, has_digests: bool = False
    ) -> None:
        self.world = world
        self.buckets = buckets
        self._has_digests = has_digests
        self._whole_row = struct.Struct(f"{_HEADER.format}{buckets}I")
        self._digest_at = self._whole_row.size
        self.row_bytes = self._whole_row.size + (_DIGEST.size if has_digests else 0)
        self.numel = world * self.row_bytes + tracked

    def write(
        self, trailer: torch.Tensor, rank: int, row: ControlRow, used: Sequence[int] = b""
    ) -> None:
        """Fill ``trailer`` with this rank's row, zeros for the others, and what it used."""
        data = bytearray(self.numel)
        late = [max(0, min(stamp, _MAX_U32)) for stamp in row.ready_us]
        start = rank * self.row_bytes
        step = row.step & _MAX_U32
        self._whole_row.pack_into(data, start, row.flags, row.drift, step, row.weight, *late)
        if self._has_digests:
            _DIGEST.pack_into(data, start + self._digest_at, row.digest)
        if used:
            data[self.world * self.row_bytes :] = bytes(used)
        write_bytes(trailer, data)

    def read(self, trailer: torch.Tensor) -> ControlBlock:
        """Decode a summed trailer."""
        end = self.world * self.row_bytes
        data, counts = read_bytes(trailer, end)
        rows = [self._row(data, start) for start in range(0, end, self.row_bytes)]
        return ControlBlock(tuple(rows), counts, self, data)

    def _row(self, data: bytes, start: int) -> ControlRow | None:
        flags, drift, step, weight = _HEADER.unpack_from(data, start)
        if not flags:
            return None
        has = self._has_digests
        digest = _DIGEST.unpack_from(data, start + self._digest_at)[0] if has else 0
        return ControlRow(flags, step, weight, (), drift, digest)

    def ready_us(self, data: bytes, rank: int) -> tuple[int, ...]:
        """Decode when a rank's buckets were ready; only statistics want to know."""
        return self._whole_row.unpack_from(data, rank * self.row_bytes)[4:]
