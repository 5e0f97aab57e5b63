"""What a batch has to say to each server, and what is made of the answers. Called by a visit.

A part is what is looked up as one: ``RowsPart`` is a group of tables whose rows travel,
``BagsPart`` one table whose bags are pooled by its server. Both give their *share* of a message to
each server and take their bytes of the reply. Must not know about sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.ps.config import DTYPES
from paceline.ps.group import Group, Place, Records
from paceline.ps.inputs import FlatBags
from paceline.ps.ledger import Pending
from paceline.ps.plan import Found
from paceline.ps.wire import RECORD, Form, Frame, Kind, Mode, Section, aligned, pack_section

Bytes = NDArray[np.uint8]
_MODES = {"sum": Mode.SUM, "mean": Mode.MEAN}


@dataclass(frozen=True, slots=True)
class Share:
    """A part's share of one message; ``records`` as they are sent."""

    records: bytes
    integers: tuple[NDArray[np.int64], ...]
    values: tuple[Bytes, ...] = ()


def message(kind: Kind, shares: Sequence[Share]) -> Pending:
    """One message out of the shares of all parts."""
    records = b"".join([share.records for share in shares])
    sections = len(records) // RECORD.itemsize
    integers = [each for share in shares for each in share.integers]
    values = [each for share in shares for each in share.values]
    return Pending(
        kind,
        f"{kind.name.lower()} of {sections} tables",
        records,
        sections,
        (_joined(integers), _joined(values)),
    )


def _joined(arrays: Sequence[Any]) -> Frame:
    if len(arrays) == 1:
        only: Frame = arrays[0].data.cast("B") if arrays[0].size else b""
        return only
    return b"".join(arrays)


@dataclass(eq=False)
class RowsPart:
    """Tables whose rows travel, without duplicates."""

    group: Group
    found: Found
    inputs: list[FlatBags]
    is_used: NDArray[np.bool_] | None = None
    _pieces: dict[int, Bytes] = field(default_factory=dict)

    @property
    def tables(self) -> tuple[int, ...]:
        """Which tables."""
        return self.group.tables

    def lookup(self, server: int) -> Share | None:
        """The ids that a server is asked for, or None."""
        low, high = self.found.span(server)
        if low == high:
            return None
        counts = self.found.counts(server)
        records = self._records(server, counts, counts > 0)
        return Share(records.tobytes(), (self.found.ids[low:high],))

    def reply_bytes(self, server: int) -> int:
        """How many bytes of the reply are for this part."""
        low, high = self.found.span(server)
        return aligned((high - low) * self.group.row_bytes)

    def put(self, server: int, values: Bytes) -> None:
        """Take a server's rows."""
        low, high = self.found.span(server)
        self._pieces[server] = values[: (high - low) * self.group.row_bytes]

    def result(self) -> Tensor:
        """All rows, in the order of ``found.ids``."""
        pieces = [self._pieces[server] for server in sorted(self._pieces)]
        self._pieces.clear()
        kin = self.group.kin
        if not pieces:
            return torch.empty((0, kin.dim), dtype=kin.dtype)
        return _tensor(pieces, kin.dtype).view(-1, kin.dim)

    def gradient(self, gradient: Tensor) -> Bytes:
        """A gradient of ``result()``, as the bytes that ``push`` cuts into shares."""
        return _bytes(gradient).reshape(-1, self.group.row_bytes)

    def push(self, server: int, gradient: Bytes, lrs: Sequence[float]) -> Share | None:
        """A server's rows of the gradient, or None."""
        low, high = self.found.span(server)
        counts = self.found.counts(server)
        keep = (counts > 0) | self.group.counts_pushes[server]
        if self.is_used is not None:
            keep &= self.is_used
        if not keep.any():
            return None
        records = self._records(server, counts, keep)
        records["lr"] = np.array([lrs[table] for table in self.group.tables])[keep]
        ids, values = self.found.ids[low:high], gradient[low:high]
        if self.is_used is not None and not self.is_used.all():
            chosen = np.repeat(self.is_used, counts)
            ids, values = ids[chosen], values[chosen]
        return Share(records.tobytes(), (ids,), _padded(values.reshape(-1)))

    def _records(self, server: int, counts: NDArray[np.int64], keep: NDArray[np.bool_]) -> Records:
        records = self.group.records[server][keep]
        records["ids"] = counts[keep]
        return records


@dataclass(eq=False)
class BagsPart:
    """One table whose bags are pooled by its server."""

    table: int
    place: Place
    input: FlatBags
    _piece: Bytes | None = None

    @property
    def tables(self) -> tuple[int, ...]:
        """Which table."""
        return (self.table,)

    def lookup(self, server: int) -> Share | None:
        """The bags, for the table's server."""
        if server != self.place.home:
            return None
        return Share(self._record(0.0), self._integers(), self._weights())

    def reply_bytes(self, server: int) -> int:
        """How many bytes of the reply are for this part."""
        if server != self.place.home:
            return 0
        return aligned(self.input.bags * self._row_bytes)

    def put(self, server: int, values: Bytes) -> None:
        """Take the pooled bags."""
        if server == self.place.home:
            self._piece = values[: self.input.bags * self._row_bytes]

    def result(self) -> Tensor:
        """The pooled bags."""
        piece, self._piece = self._piece, None
        config = self.place.config
        if piece is None:  # no bag at all
            return torch.empty((0, config.embedding_dim), dtype=config.dtype)
        return _tensor([piece], config.dtype).view(-1, config.embedding_dim)

    def gradient(self, gradient: Tensor) -> Bytes:
        """A gradient of ``result()``; a copy, because it may be the user's own tensor."""
        found: Bytes = _bytes(gradient).copy()
        return found

    def push(self, server: int, gradient: Bytes, lrs: Sequence[float]) -> Share | None:
        """The bags again, with their gradient."""
        if server != self.place.home:
            return None
        values = (*self._weights(), *_padded(gradient))
        return Share(self._record(lrs[self.table]), self._integers(), values)

    @property
    def _row_bytes(self) -> int:
        return self.place.config.embedding_dim * self.place.config.dtype.itemsize

    def _record(self, lr: float) -> bytes:
        config, bags = self.place.config, self.input
        return pack_section(
            Section(
                self.place.numbers[self.place.home],
                Form.BAGS,
                DTYPES[config.dtype],
                len(bags.ids),
                bags.bags,
                _MODES[config.mode],
                bags.weights is not None,
                lr,
            )
        )

    def _integers(self) -> tuple[NDArray[np.int64], ...]:
        assert self.input.offsets is not None
        return (self.input.ids, self.input.offsets)

    def _weights(self) -> tuple[Bytes, ...]:
        weights = self.input.weights
        return () if weights is None else _padded(_bytes(weights))


Part = RowsPart | BagsPart


def _bytes(tensor: Tensor) -> Bytes:
    flat = tensor.detach().cpu().contiguous().view(-1)
    found: Bytes = flat.view(torch.uint8).numpy()
    return found


def _padded(values: Bytes) -> tuple[Bytes, ...]:
    missing = aligned(len(values)) - len(values)
    return (values, np.zeros(missing, np.uint8)) if missing else (values,)


def _tensor(pieces: list[Bytes], dtype: torch.dtype) -> Tensor:
    """One tensor; without a copy if there is one large piece, which then is aligned."""
    is_view = len(pieces) == 1 and pieces[0].ctypes.data % dtype.itemsize == 0
    whole = pieces[0] if is_view else np.concatenate(pieces)
    return torch.from_numpy(whole).view(dtype)
