"""The plan of a batch for one group of tables: its rows, and what each server is sent.

Called by ``ps/client/table_set.py`` and ``ps/client/row_io.py``. The native core
(``native/ps/plan.c``) does all of it in one call. Where there is none, and where it refuses, numpy
does the same (``ps/client/row_plan.py``), and says what is wrong.

[Note: side by side]
Tables that all got the very same bags have the same distinct ids. Their rows can stand side by side
in one line for each id, and so can their gradients: one table that is ``tables`` times as wide. To
its ids torch's backward does what it does to those of each table by itself
(``ps/client/bag_pooling.py`` says why that matters), and it does it once instead of ``tables``
times.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.native.extension import native
from paceline.ps.client.batch import FlatBags
from paceline.ps.client.row_plan import DistinctRows, Flags, Ints
from paceline.ps.client.table_group import Group
from paceline.ps.protocol.wire import RECORD, Frame


class RowsRequest(NamedTuple):
    """What one server is sent.

    Args:
        lookup: The records of a lookup.
        push: Those of a push, if the learning rates are still the same.
        sections: How many records.
        ids: As they are sent.
    """

    lookup: bytes
    push: bytes
    sections: int
    ids: Frame


class Plan:
    """The rows of a batch.

    Args:
        templates: What the records of ``shares`` were made of.
        shares: For each server what it is sent, or None.
        repeats: For each table two bytes: whether it has an id twice, then whether three times.
        distinct: How many rows.

    Attributes:
        places: For each id of all tables, where its row is among the distinct ones.
        offsets: Where bags begin in that, one table after the other; none for ``nn.Embedding``.
        bag_of: For each id, the bag it is in; None: not computed.
        counts: How many rows each server has.
        is_abreast: See the note; False also where it was not computed.
    """

    places: Tensor
    offsets: Tensor
    bag_of: Tensor | None = None
    is_abreast = False

    def __init__(
        self,
        templates: bytes,
        shares: Sequence[RowsRequest | None],
        repeats: bytes,
        distinct: int,
    ) -> None:
        self.templates = templates
        self.shares = shares
        self.repeats = repeats
        self.distinct = distinct
        self.tables = len(repeats) // 2
        self.counts = tuple([0 if each is None else len(each.ids) // 8 for each in shares])

    @property
    def twice(self) -> Flags:
        """Which tables have an id twice or more often."""
        return np.frombuffer(self.repeats, np.bool_, self.tables)

    @property
    def thrice(self) -> Flags:
        """The same for three times."""
        return np.frombuffer(self.repeats, np.bool_, self.tables, self.tables)

    @property
    def found(self) -> DistinctRows:
        """The same in numpy, for what is rare."""
        raise NotImplementedError


class NumpyPlan(Plan):
    """A plan by ``Layout.find``."""

    def __init__(self, group: Group, inputs: Sequence[FlatBags], templates: bytes) -> None:
        found = group.layout.find([each.ids_array for each in inputs])
        records = np.frombuffer(templates, RECORD).reshape(len(group.records), -1)
        shares = [_share(found, server, mine) for server, mine in enumerate(records)]
        repeats = found.twice.tobytes() + found.thrice.tobytes()
        super().__init__(templates, shares, repeats, len(found.ids))
        self.places = torch.from_numpy(found.inverse)
        self.offsets = torch.from_numpy(_offsets(inputs))
        self._found = found

    @property
    def found(self) -> DistinctRows:
        """All there is."""
        return self._found


class NativePlan(Plan):
    """A plan by the native core. Its arrays are parts of one memory, in the order of ``lay_out``.

    Args:
        templates: See the base.
        first: How many ids the first table has.
        found: What the core returned.
    """

    def __init__(self, templates: bytes, first: int, found: Any) -> None:
        self._memory, ids, bags, distinct, shares, repeats, self.is_abreast = found
        shares = [None if share is None else RowsRequest._make(share) for share in shares]
        super().__init__(templates, shares, repeats, distinct)
        self._first = first
        self._ranks_at = 2 * ids + bags
        self._ids_at = 3 * ids + bags + first
        self.places = self._ints(0, ids)
        self.offsets = self._ints(2 * ids, bags)

    @property
    def bag_of(self) -> Tensor:  # type: ignore[override]
        """For each id, the bag it is in."""
        return self._ints(len(self.places), len(self.places))

    @property
    def ranks(self) -> Tensor:
        """Abreast: for each id of the bags, which of the distinct ones it is."""
        return self._ints(self._ranks_at, self._first)

    @property
    def first_bag_of(self) -> Tensor:
        """Abreast: for each id of the bags, the bag it is in."""
        return self._ints(len(self.places), self._first)

    def cut(self, lines: Tensor, row_bytes: int) -> tuple[bytes, ...]:
        """Abreast: lines of the rows of all tables for each id, as rows for each server."""
        first = self._ranks_at + self._first
        found: tuple[bytes, ...] = native.gather(
            lines.data_ptr(), row_bytes, self._memory, first, self.counts
        )
        return found

    @cached_property
    def found(self) -> DistinctRows:
        """The same in numpy."""
        numbers = np.frombuffer(self._memory, np.int64)
        ids = numbers[self._ids_at :][: self.distinct]
        starts = numbers[self._ids_at + len(self.places) :]
        inverse = numbers[: len(self.places)]
        return DistinctRows(ids, inverse, starts, self.tables, self.twice, self.thrice)

    def _ints(self, at: int, count: int) -> Tensor:
        if not count:
            return torch.empty(0, dtype=torch.int64)
        return torch.frombuffer(self._memory, dtype=torch.int64, count=count, offset=8 * at)


def planned(group: Group, inputs: Sequence[FlatBags], lrs: Sequence[float]) -> Plan:
    """Plan the batch of a group.

    Raises:
        IdRangeError: An id is outside of its table.
    """
    templates = group.templates(lrs)
    if native is not None:
        spots = [each.spot for each in inputs]
        found = native.plan(group.layout.packed, templates, spots)
        if found is not None:
            return NativePlan(templates, spots[0][1], found)
    return NumpyPlan(group, inputs, templates)


def _share(found: DistinctRows, server: int, templates: np.ndarray) -> RowsRequest | None:
    counts = found.counts(server)
    keep = counts > 0
    if not keep.any():
        return None
    low = int(found.starts[server * found.tables])
    push = templates[keep]
    push["ids"] = counts[keep]
    lookup = push.copy()
    lookup["lr"] = 0.0
    ids = found.ids[low : low + int(counts.sum())]
    return RowsRequest(lookup.tobytes(), push.tobytes(), len(push), ids.data.cast("B"))


def _offsets(inputs: Sequence[FlatBags]) -> Ints:
    """Where bags begin in the ids of all tables, one table after the other."""
    if inputs[0].offsets is None:
        return np.empty(0, np.int64)
    offsets = np.concatenate([each.offsets_array for each in inputs])
    ends = np.cumsum([0, *(each.count for each in inputs[:-1])])
    offsets += np.repeat(ends, [each.bags for each in inputs])
    return offsets
