"""What a batch has to say to each server, and what is made of the answers. Called by an exchange.

A part is what is looked up as one: ``RowsPart`` is a group of tables whose rows travel,
``BagsPart`` one table whose bags are pooled by its server. Both give their *share* of a message to
each server and take their bytes of the reply. Must not know about sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.ps.client.batch import FlatBags
from paceline.ps.client.ledger import OpenRequest
from paceline.ps.client.message_plan import RowsPlan
from paceline.ps.client.table_config import DTYPES
from paceline.ps.client.table_group import AttachedTable, Group
from paceline.ps.protocol.wire import (
    ALIGNMENT,
    Form,
    Frame,
    Kind,
    Mode,
    Section,
    aligned,
    pack_section,
)

_MODES = {"sum": Mode.SUM, "mean": Mode.MEAN}


class PartRequest(NamedTuple):
    """A part's share of one message, as it is sent."""

    records: bytes
    sections: int
    integers: Frame
    values: Frame = b""


def message(kind: Kind, shares: Sequence[PartRequest]) -> OpenRequest:
    """One message out of the shares of all parts."""
    if len(shares) == 1:
        records, sections, integers, values = shares[0]
    else:
        records = b"".join([share.records for share in shares])
        sections = sum([share.sections for share in shares])
        integers = b"".join([share.integers for share in shares])
        values = b"".join([share.values for share in shares])
    return OpenRequest(kind, _what(kind, sections), records, sections, (integers, values))


def _what(kind: Kind, sections: int) -> str:
    found = _WHAT.get((kind, sections))
    if found is None:
        found = f"{kind.name.lower()} of {sections} tables"
        _WHAT[kind, sections] = found
    return found


_WHAT: dict[tuple[Kind, int], str] = {}
"""By kind and number of tables, which are few."""


class RowsPart:
    """Tables whose rows travel, without duplicates.

    Args:
        group: Which tables.
        plan: Which rows.
        inputs: For which bags.

    Attributes:
        is_used: Which tables have a gradient; None: all.
    """

    def __init__(self, group: Group, plan: RowsPlan, inputs: list[FlatBags]) -> None:
        self.group = group
        self.plan = plan
        self.inputs = inputs
        self.tables = group.tables
        self.is_used: NDArray[np.bool_] | None = None
        self._pieces: dict[int, memoryview] = {}

    def lookup(self, server: int) -> PartRequest | None:
        """The ids that a server is asked for, or None."""
        share = self.plan.shares[server]
        return None if share is None else PartRequest(share.lookup, share.sections, share.ids)

    def reply_bytes(self, server: int) -> int:
        """How many bytes of the reply are for this part."""
        return aligned(self.plan.counts[server] * self.group.row_bytes)

    def put(self, server: int, values: memoryview) -> None:
        """Take a server's rows."""
        self._pieces[server] = values[: self.plan.counts[server] * self.group.row_bytes]

    def result(self) -> Tensor:
        """All rows, in the order of the plan."""
        pieces = [self._pieces[server] for server in sorted(self._pieces)]
        self._pieces.clear()
        key = self.group.key
        return _tensor(pieces, key.dtype).view(-1, key.dim)

    def gradient(self, gradient: Tensor) -> list[Frame]:
        """A gradient of ``result()``, as bytes for each server."""
        whole, at = _bytes(gradient), 0
        pieces = []
        for count in self.plan.counts:
            end = at + count * self.group.row_bytes
            pieces.append(whole[at:end])
            at = end
        return pieces

    def push(self, server: int, gradient: Frame, lrs: Sequence[float]) -> PartRequest | None:
        """A server's rows of the gradient, or None."""
        share, group = self.plan.shares[server], self.group
        is_planned = self.is_used is None and group.templates(lrs) is self.plan.templates
        sections = 0 if share is None else share.sections
        if not is_planned or sections < group.least_sections[server]:
            return self._rare_push(server, gradient, lrs)
        if share is None:
            return None
        return PartRequest(share.push, sections, share.ids, _padded(gradient))

    def _rare_push(self, server: int, gradient: Frame, lrs: Sequence[float]) -> PartRequest | None:
        """Not all tables have a gradient, or one without is counted too, or rates are others."""
        found, group = self.plan.found, self.group
        counts = found.counts(server)
        keep = (counts > 0) | group.counts_pushes[server]
        chosen: Any = slice(None)
        if self.is_used is not None:
            keep &= self.is_used
            chosen = np.repeat(self.is_used, counts)
        if not keep.any():
            return None
        records = group.records[server][keep]
        records["ids"] = counts[keep]
        records["lr"] = np.array([lrs[table] for table in group.tables])[keep]
        low = int(found.starts[server * found.tables])
        ids = found.ids[low : low + int(counts.sum())][chosen]
        rows = np.frombuffer(gradient, np.uint8).reshape(-1, group.row_bytes)[chosen]
        return PartRequest(records.tobytes(), len(records), ids.tobytes(), _padded(rows.tobytes()))


@dataclass(eq=False)
class BagsPart:
    """One table whose bags are pooled by its server."""

    table: int
    attached: AttachedTable
    input: FlatBags
    _piece: memoryview | None = None

    @property
    def tables(self) -> tuple[int, ...]:
        """Which table."""
        return (self.table,)

    def lookup(self, server: int) -> PartRequest | None:
        """The bags, for the table's server."""
        if server != self.attached.first_server:
            return None
        return PartRequest(self._record(0.0), 1, self._integers(), self._weights())

    def reply_bytes(self, server: int) -> int:
        """How many bytes of the reply are for this part."""
        if server != self.attached.first_server:
            return 0
        return aligned(self.input.bags * self._row_bytes)

    def put(self, server: int, values: memoryview) -> None:
        """Take the pooled bags."""
        if server == self.attached.first_server:
            self._piece = values[: self.input.bags * self._row_bytes]

    def result(self) -> Tensor:
        """The pooled bags."""
        piece, self._piece = self._piece, None
        config = self.attached.config
        pieces = [] if piece is None else [piece]  # None: no bag at all
        return _tensor(pieces, config.dtype).view(-1, config.embedding_dim)

    def gradient(self, gradient: Tensor) -> list[Frame]:
        """A gradient of ``result()``; a copy, because it may be the user's own tensor."""
        found = bytes(_bytes(gradient))
        return [found if number >= 0 else b"" for number in self.attached.numbers]

    def push(self, server: int, gradient: Frame, lrs: Sequence[float]) -> PartRequest | None:
        """The bags again, with their gradient."""
        if server != self.attached.first_server:
            return None
        values = b"".join((self._weights(), _padded(gradient)))
        return PartRequest(self._record(lrs[self.table]), 1, self._integers(), values)

    @property
    def _row_bytes(self) -> int:
        return self.attached.config.embedding_dim * self.attached.config.dtype.itemsize

    def _record(self, lr: float) -> bytes:
        config, bags = self.attached.config, self.input
        return pack_section(
            Section(
                self.attached.numbers[self.attached.first_server],
                Form.BAGS,
                DTYPES[config.dtype],
                bags.count,
                bags.bags,
                _MODES[config.mode],
                bags.weights is not None,
                lr,
            )
        )

    def _integers(self) -> Frame:
        # A copy: the user may change these tensors before they are sent again.
        return self.input.ids_array.tobytes() + self.input.offsets_array.tobytes()

    def _weights(self) -> Frame:
        weights = self.input.weights
        return b"" if weights is None else _padded(_bytes(weights))


Part = RowsPart | BagsPart


def _bytes(tensor: Tensor) -> Frame:
    """The memory of a tensor; a copy only if that is elsewhere, or not in one piece."""
    flat = tensor.detach().cpu().contiguous()
    if not flat.numel():
        return b""
    if flat.dtype is torch.bfloat16:  # numpy has none
        flat = flat.view(torch.int16)
    return flat.numpy().data.cast("B")


def _padded(values: Frame) -> Frame:
    missing = -len(values) % ALIGNMENT
    return b"".join((values, bytes(missing))) if missing else values


def _tensor(pieces: Sequence[memoryview], dtype: torch.dtype) -> Tensor:
    """One tensor; without a copy if there is one piece that is aligned and may be written to."""
    if len(pieces) == 1 and not pieces[0].readonly and len(pieces[0]):
        found = torch.frombuffer(pieces[0], dtype=dtype)
        if found.data_ptr() % dtype.itemsize == 0:
            return found
    whole = bytearray().join(pieces)
    return torch.frombuffer(whole, dtype=dtype) if whole else torch.empty(0, dtype=dtype)
