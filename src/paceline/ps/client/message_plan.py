"""The plan of a batch for one group of tables: its rows, and what each server is sent.

Called by ``ps/client/table_set.py`` and ``ps/client/row_io.py``. The native core
(``native/ps/plan.c``) does all of it in one call. Where there is none, and where it refuses, numpy
does the same (``ps/client/row_plan.py``), and says what is wrong.

[Note: shared bags]
Tables that all got the very same bags have the same distinct ids. Their rows can stand side by side
in one line for each id, and so can their gradients: one table that is ``tables`` times as wide. To
its ids torch's backward does what it does to those of each table by itself
(``ps/client/bag_pooling.py`` says why that matters), and it does it once instead of ``tables``
times.
"""

from __future__ import annotations

import struct
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

_INT = struct.Struct("<q")
PLAN_HEAD = struct.Struct("<8q")
"""``PlanHead``; ``pl_plan_head`` in ``native/ps/plan.h``."""


class PlanHead(NamedTuple):
    """Where the arrays of a native plan begin in its memory, counted in int64."""

    places: int
    bag_of: int
    offsets: int
    ranks: int
    gather: int
    ids: int
    starts: int
    end: int


class RowsRequest(NamedTuple):
    """What one server is sent.

    Args:
        lookup: The records of a lookup.
        push: Those of a push, if the learning rates are still the same.
        ids: As they are sent.
    """

    lookup: bytes
    push: bytes
    ids: Frame

    @property
    def sections(self) -> int:
        """How many records."""
        return len(self.lookup) // RECORD.itemsize


class RowsPlan:
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
        has_shared_bags: See the note; False also where it was not computed.
        found: The same in numpy, for what is rare.
    """

    places: Tensor
    offsets: Tensor
    bag_of: Tensor | None = None
    has_shared_bags = False
    found: DistinctRows

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
    def has_pairs(self) -> Flags:
        """Which tables have an id twice or more often."""
        return np.frombuffer(self.repeats, np.bool_, self.tables)

    @property
    def has_triples(self) -> Flags:
        """The same for three times."""
        return np.frombuffer(self.repeats, np.bool_, self.tables, self.tables)


class NumpyPlan(RowsPlan):
    """A plan by ``Layout.find``."""

    def __init__(self, group: Group, inputs: Sequence[FlatBags], templates: bytes) -> None:
        found = group.layout.find([each.ids_array for each in inputs])
        records = np.frombuffer(templates, RECORD).reshape(len(group.records), -1)
        shares = [_share(found, server, mine) for server, mine in enumerate(records)]
        repeats = found.has_pairs.tobytes() + found.has_triples.tobytes()
        super().__init__(templates, shares, repeats, len(found.ids))
        self.places = torch.from_numpy(found.inverse)
        self.offsets = torch.from_numpy(_offsets(inputs))
        self.found = found


class NativePlan(RowsPlan):
    """A plan by the native core: arrays in one memory, which begins with a ``PlanHead``.

    Args:
        templates: See the base.
        has_shared_bags: See the base.
        found: What the core returned.
    """

    def __init__(self, templates: bytes, has_shared_bags: bool, found: Any) -> None:
        self._memory, shares, repeats = found
        self._at = at = PlanHead._make(PLAN_HEAD.unpack_from(self._memory))
        shares = [None if share is None else RowsRequest._make(share) for share in shares]
        (distinct,) = _INT.unpack_from(self._memory, 8 * (at.end - 1))
        super().__init__(templates, shares, repeats, distinct)
        self.has_shared_bags = has_shared_bags
        self.places = self._ints(at.places, at.bag_of)
        self.offsets = self._ints(at.offsets, at.ranks)

    @property
    def bag_of(self) -> Tensor:  # type: ignore[override]
        """For each id, the bag it is in."""
        return self._ints(self._at.bag_of, self._at.offsets)

    @property
    def ranks(self) -> Tensor:
        """Of shared bags: for each id, which of the distinct ones it is."""
        return self._ints(self._at.ranks, self._at.gather)

    @property
    def first_bag_of(self) -> Tensor:
        """Of shared bags: for each id, the bag it is in."""
        at = self._at
        return self._ints(at.bag_of, at.bag_of + at.gather - at.ranks)

    def cut(self, lines: Tensor, row_bytes: int) -> tuple[bytes, ...]:
        """Of shared bags: lines of the rows of all tables for each id, as rows for each server."""
        found: tuple[bytes, ...] = native.gather(
            lines.data_ptr(), row_bytes, self._memory, self._at.gather, self.counts
        )
        return found

    @cached_property
    def found(self) -> DistinctRows:  # type: ignore[override]
        """The same in numpy."""
        numbers, at = np.frombuffer(self._memory, np.int64), self._at
        ids, inverse = numbers[at.ids :][: self.distinct], numbers[at.places : at.bag_of]
        return DistinctRows(
            ids, inverse, numbers[at.starts :], self.tables, self.has_pairs, self.has_triples
        )

    def _ints(self, start: int, stop: int) -> Tensor:
        if start == stop:
            return torch.empty(0, dtype=torch.int64)
        return torch.frombuffer(
            self._memory, dtype=torch.int64, count=stop - start, offset=8 * start
        )


def planned(group: Group, inputs: Sequence[FlatBags], lrs: Sequence[float]) -> RowsPlan:
    """Plan the batch of a group.

    Raises:
        IdRangeError: An id is outside of its table.
    """
    templates = group.templates(lrs)
    if native is not None:
        batches = [each.packed for each in inputs]
        is_shared = inputs[0].bags > 0 and 1 < len(batches) == batches.count(batches[0])
        found = native.plan(group.layout.packed, templates, b"".join(batches), is_shared)
        if found is not None:
            return NativePlan(templates, is_shared, found)
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
    return RowsRequest(lookup.tobytes(), push.tobytes(), ids.data.cast("B"))


def _offsets(inputs: Sequence[FlatBags]) -> Ints:
    """Where bags begin in the ids of all tables, one table after the other."""
    if inputs[0].offsets is None:
        return np.empty(0, np.int64)
    offsets = np.concatenate([each.offsets_array for each in inputs])
    ends = np.cumsum([0, *(each.count for each in inputs[:-1])])
    offsets += np.repeat(ends, [each.bags for each in inputs])
    return offsets
