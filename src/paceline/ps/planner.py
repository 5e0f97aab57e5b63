"""The plan of a batch for one group of tables: its rows, and what each server is sent.

Called by ``ps/tables.py`` and ``ps/transfer.py``. The native core (``native/plan.c``) does all of
it in one call. Where there is none, and where it refuses, numpy does the same (``ps/plan.py``), and
says what is wrong.

[Note: abreast]
Tables that all got the very same bags have the same distinct ids. Their rows can stand side by side
in one line for each id, and so can their gradients: one table that is ``tables`` times as wide. To
its ids torch's backward does what it does to those of each table by itself (``ps/pool.py`` says why
that matters), and it does it once instead of ``tables`` times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.ps.extension import native
from paceline.ps.group import Group
from paceline.ps.inputs import FlatBags
from paceline.ps.plan import Flags, Found, Ints
from paceline.ps.wire import RECORD, Frame


class RowsShare(NamedTuple):
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


class Abreast(NamedTuple):
    """See the note.

    Args:
        ranks: For each id of the bags, which of the distinct ones it is.
        gather: For each row of the plan, which it is in lines of ``tables`` rows for each id.
    """

    ranks: Tensor
    gather: Tensor


@dataclass(eq=False)
class Plan:
    """The rows of a batch.

    Args:
        places: For each id of all tables, where its row is among the distinct ones.
        offsets: Where bags begin in that, one table after the other; none for ``nn.Embedding``.
        bag_of: For each id, the bag it is in; None: not computed.
        distinct: How many rows.
        shares: For each server what it is sent, or None.
        repeats: For each table two bytes: whether it has an id twice, then whether three times.
        templates: What the records of ``shares`` were made of.
        abreast: See the note; None: it is not the case, or not computed.
    """

    places: Tensor
    offsets: Tensor
    bag_of: Tensor | None
    distinct: int
    shares: Sequence[RowsShare | None]
    repeats: bytes
    templates: bytes
    abreast: Abreast | None
    _rest: Tensor | Found

    @property
    def tables(self) -> int:
        """How many tables."""
        return len(self.repeats) // 2

    @property
    def twice(self) -> Flags:
        """Which tables have an id twice or more often."""
        return np.frombuffer(self.repeats, np.bool_, self.tables)

    @property
    def thrice(self) -> Flags:
        """The same for three times."""
        return np.frombuffer(self.repeats, np.bool_, self.tables, self.tables)

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """For each server where its rows begin and end."""
        spans, low = [], 0
        for share in self.shares:
            high = low if share is None else low + len(share.ids) // 8
            spans.append((low, high))
            low = high
        return spans

    @cached_property
    def found(self) -> Found:
        """The same in numpy, for what is rare."""
        if isinstance(self._rest, Found):
            return self._rest
        rest = self._rest.numpy()
        starts = rest[len(self.places) :]
        inverse = self.places.numpy()
        ids = rest[: self.distinct]
        return Found(ids, inverse, starts, self.tables, self.twice, self.thrice)


def planned(group: Group, inputs: Sequence[FlatBags], lrs: Sequence[float]) -> Plan:
    """Plan the batch of a group.

    Raises:
        IdRangeError: An id is outside of its table.
    """
    templates = group.templates(lrs)
    found = None if native is None else _by_native(group, inputs, templates)
    return _by_numpy(group, inputs, templates) if found is None else found


def _by_native(group: Group, inputs: Sequence[FlatBags], templates: bytes) -> Plan | None:
    spots = [each.spot for each in inputs]
    first, ids = spots[0][1], sum([spot[1] for spot in spots])
    bags, starts = sum([spot[3] for spot in spots]), len(templates) // RECORD.itemsize + 1
    memory = torch.empty(4 * ids + bags + first + starts, dtype=torch.int64)
    found = native.plan(group.layout.packed, templates, spots, memory.data_ptr())
    if found is None:
        return None
    distinct, shares, repeats, is_alike = found
    # The order of `lay_out` in native/plan.c.
    sizes = [ids, ids, bags, first, distinct, ids - distinct, ids + starts]
    places, bag_of, offsets, ranks, gather, _, rest = memory.split_with_sizes(sizes)
    shares = [None if share is None else RowsShare._make(share) for share in shares]
    abreast = Abreast(ranks, gather) if is_alike else None
    return Plan(places, offsets, bag_of, distinct, shares, repeats, templates, abreast, rest)


def _by_numpy(group: Group, inputs: Sequence[FlatBags], templates: bytes) -> Plan:
    found = group.layout.find([each.ids_array for each in inputs])
    records = np.frombuffer(templates, RECORD).reshape(len(group.records), -1)
    shares = [_share(found, server, mine) for server, mine in enumerate(records)]
    return Plan(
        torch.from_numpy(found.inverse),
        torch.from_numpy(_offsets(inputs)),
        None,
        len(found.ids),
        shares,
        found.twice.tobytes() + found.thrice.tobytes(),
        templates,
        None,
        found,
    )


def _share(found: Found, server: int, templates: np.ndarray) -> RowsShare | None:
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
    return RowsShare(lookup.tobytes(), push.tobytes(), len(push), ids.data.cast("B"))


def _offsets(inputs: Sequence[FlatBags]) -> Ints:
    """Where bags begin in the ids of all tables, one table after the other."""
    if inputs[0].offsets is None:
        return np.empty(0, np.int64)
    offsets = np.concatenate([each.offsets_array for each in inputs])
    ends = np.cumsum([0, *(each.count for each in inputs[:-1])])
    offsets += np.repeat(ends, [each.bags for each in inputs])
    return offsets
