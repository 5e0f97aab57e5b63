"""A data message, checked against the tables of a server: who gets which ids and values.

Called by ``ps/state/store.py``. After ``checked`` each section is known to fit: its table exists
and has its dtype, its ids are of this server, its arrays have the announced sizes. Nothing has been
changed by then; what does not fit raises ``Refusal``.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.ps.protocol.wire import MAX_LEARNING_RATE, Form, Kind, Message, Section, aligned
from paceline.ps.state.bag_pooling import SectionBags
from paceline.ps.state.refusal import Code, Refusal
from paceline.ps.state.table import Table


@dataclass(slots=True)
class CheckedSection:
    """One table's checked share of a message.

    Args:
        table: Whose.
        section: As it was sent.
        ids: Different ids (``ROWS``), or the different ids of all bags.
        slots: Of these.
        frame: The values of the whole message.
        offset: Where the gradient or the new rows of ``ids``, or of the bags, begin in it.
        bags: For the form ``BAGS``.
    """

    table: Table
    section: Section
    ids: NDArray[np.int64]
    slots: NDArray[np.int32]
    frame: memoryview
    offset: int
    bags: SectionBags | None

    @property
    def values(self) -> Tensor:
        """What was sent for each row, or for each bag."""
        lines = self.section.ids if self.bags is None else self.section.bags
        return _tensor(self.table, self.frame, self.offset, lines, self.table.spec.dim)

    @property
    def gradient(self) -> Tensor:
        """The gradient of ``ids``."""
        return self.values if self.bags is None else self.bags.gradient(self.values)

    def push(self) -> None:
        """Apply the gradient, and count it."""
        start_ns = time.perf_counter_ns()
        self.table.push(self.ids, self.slots, self.gradient, self.section.lr)
        self.table.pushes.add(self.section.ids, start_ns, time.perf_counter_ns())

    def write(self) -> None:
        """Overwrite the rows."""
        self.table.write(self.ids, self.slots, self.values)


def checked(tables: Sequence[Table], message: Message) -> list[CheckedSection]:
    """Check a LOOKUP, PUSH or WRITE completely.

    Raises:
        Refusal: It does not fit; the text names table and id.
    """
    kind = message.head.kind
    facts = _Facts(message)
    values = _Values(message.values)
    shares = []
    at = 0
    for section in message.sections:
        table = _table(tables, section)
        _check_kind(table, section)
        end = at + section.ids + section.bags
        integers = message.integers[at:end]
        if section.form is Form.BAGS:
            share = _bags_share(table, kind, section, integers, values)
        else:
            share = _rows_share(table, section, integers, values, facts)
        shares.append(share)
        at = end
    values.check_end()
    if facts.has_values:
        _check_once(shares)
    return shares


class _Facts:
    """What one look at all integers of a message says about each of its sections.

    The checks of a section cost as much as its work when it is small: here one call of numpy is
    for all of them. Where that check says no, each section is looked at by itself.
    """

    def __init__(self, message: Message) -> None:
        integers = message.integers
        self.has_values = message.head.kind is not Kind.LOOKUP
        # As unsigned numbers, negative ids are the largest.
        self.largest = int(integers.view(np.uint64).max()) if len(integers) else 0
        self.is_ascending = True
        if self.has_values:
            borders = set(itertools.accumulate(s.ids + s.bags for s in message.sections))
            steps_back = np.flatnonzero(integers[1:] <= integers[:-1]).tolist()
            # A step back at i is between i and i + 1; between two sections it means nothing.
            self.is_ascending = all(place + 1 in borders for place in steps_back)


def _check_kind(table: Table, section: Section) -> None:
    if section.dtype is not table.spec.dtype:
        raise Refusal(
            Code.TABLE,
            f"table {table.spec.name!r} has {table.spec.dtype.name}, not {section.dtype.name}",
            table=table.spec.name,
        )
    if not 0 <= section.lr <= MAX_LEARNING_RATE:  # nor if it is not a number
        raise Refusal(
            Code.WIRE,
            f"a learning rate of {section.lr} for table {table.spec.name!r}: it is from 0 to "
            f"{MAX_LEARNING_RATE:g}",
            table=table.spec.name,
        )


def _rows_share(
    table: Table, section: Section, ids: NDArray[np.int64], values: _Values, facts: _Facts
) -> CheckedSection:
    in_range = facts.largest < table.spec.rows
    slots = table.locate_in_range(ids) if in_range else table.locate(ids)
    if not facts.has_values:
        return CheckedSection(table, section, ids, slots, values.frame, 0, None)
    if not facts.is_ascending:
        table.owned.check_different(ids)
    offset = values.take(table, section.ids, table.spec.dim)
    return CheckedSection(table, section, ids, slots, values.frame, offset, None)


def _bags_share(
    table: Table, kind: Kind, section: Section, integers: NDArray[np.int64], values: _Values
) -> CheckedSection:
    if kind is Kind.WRITE or table.owned.is_cut:
        raise Refusal(
            Code.TABLE,
            f"{kind.name} with bags for table {table.spec.name!r}: rows are written one by one, "
            "and a table cut by rows is pooled by the trainer",
            table=table.spec.name,
        )
    ids, offsets = integers[: section.ids], integers[section.ids :]
    _check_offsets(table, len(ids), offsets)
    table.locate(ids)
    weights = None
    if section.weighted:
        weights_at = values.take(table, section.ids, 1)
        weights = _tensor(table, values.frame, weights_at, section.ids, 1).view(-1)
    offset = values.take(table, section.bags, table.spec.dim) if kind is Kind.PUSH else 0
    bags = SectionBags(table, section.mode, ids, offsets, weights)
    return CheckedSection(
        table, section, bags.ids, table.locate(bags.ids), values.frame, offset, bags
    )


def _tensor(table: Table, frame: memoryview, offset: int, lines: int, width: int) -> Tensor:
    if not lines:
        return torch.empty((0, width), dtype=table.dtype)
    count = lines * width
    flat = torch.frombuffer(frame, dtype=table.dtype, count=count, offset=offset)
    return flat.view(lines, width)


class _Values:
    """The values frame, taken from front to back."""

    def __init__(self, frame: memoryview) -> None:
        # Tensors are made over it without a copy, which torch wants to be writable.
        self.frame = memoryview(bytearray(frame)) if frame.readonly else frame
        self._length = len(frame)
        self._at = 0

    def take(self, table: Table, lines: int, width: int) -> int:
        """Where the next array begins; it is there as a whole."""
        start = self._at
        self._at = start + aligned(lines * width * table.dtype.itemsize)
        if self._at > self._length:
            raise Refusal(
                Code.WIRE,
                f"{self._length} bytes of values, and table {table.spec.name!r} alone needs "
                f"them up to {self._at}: {lines} x {width} of {table.spec.dtype.name}",
                table=table.spec.name,
            )
        return start

    def check_end(self) -> None:
        if self._at != self._length:
            raise Refusal(
                Code.WIRE, f"{self._length} bytes of values, of which {self._at} are announced"
            )


def _table(tables: Sequence[Table], section: Section) -> Table:
    if section.table >= len(tables):
        raise Refusal(
            Code.TABLE,
            f"there is no table number {section.table} on this server, which has {len(tables)}; "
            "ATTACH comes first",
        )
    return tables[section.table]


def _check_once(shares: Sequence[CheckedSection]) -> None:
    seen: set[int] = set()
    for share in shares:
        if share.table.number in seen:
            raise Refusal(
                Code.TABLE,
                f"table {share.table.spec.name!r} comes twice in one message",
                table=share.table.spec.name,
            )
        seen.add(share.table.number)


def _check_offsets(table: Table, ids: int, offsets: NDArray[np.int64]) -> None:
    if not len(offsets):
        fits = ids == 0
    else:
        fits = offsets[0] == 0 and offsets[-1] <= ids and not (offsets[1:] < offsets[:-1]).any()
    if not fits:
        raise Refusal(
            Code.WIRE,
            f"the offsets of {len(offsets)} bags with {ids} ids of table {table.spec.name!r} do "
            "not begin with 0, or do not ascend, or go beyond the ids",
            table=table.spec.name,
        )


def reply_bytes(shares: Sequence[CheckedSection]) -> Iterator[int]:
    """How many bytes each share of a LOOKUP takes in its FOUND."""
    for share in shares:
        yield share.section.rows_bytes(share.table.spec.dim)
