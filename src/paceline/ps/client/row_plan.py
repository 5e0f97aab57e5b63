"""Which rows a batch needs, and from which server: pure numpy, no message, no torch.

Called by ``ps/client/message_plan.py`` where there is no native core, and where that says no.
Tables of the same kind are planned together, in one sort: each id becomes a key of server, table
and id; what is left after removing duplicates stands in the order of the messages, so a server's
share is a slice of everything, and so is a table's share of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.errors import IdRangeError
from paceline.ps.protocol.sharding import owners
from paceline.ps.protocol.table_spec import Sharding

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

ID_BITS, TABLE_BITS = 40, 12
"""Of a key; the bits above these are the server's index."""
MOST_TABLES = 1 << TABLE_BITS
MOST_SERVERS = (1 << (63 - ID_BITS - TABLE_BITS)) - 1
_ID = np.int64((1 << ID_BITS) - 1)


@dataclass(frozen=True)
class DistinctRows:
    """The distinct rows of a batch.

    Args:
        ids: By server, then by table, then by id.
        inverse: For each id of the batch, where its row is in ``ids``.
        starts: Where the rows of table ``t`` on server ``s`` begin: ``starts[s * tables + t]``;
            one more at the end.
        tables: How many tables.
        twice: Which tables have an id twice or more often in this batch.
        thrice: The same for three times.
    """

    ids: Ints
    inverse: Ints
    starts: Ints
    tables: int
    twice: Flags
    thrice: Flags

    def counts(self, server: int) -> Ints:
        """How many rows of each table a server has."""
        first = server * self.tables
        return np.diff(self.starts[first : first + self.tables + 1])

    def places(self, table: int) -> Ints:
        """Where the rows of a table are, on all servers, in the order of their ids."""
        firsts = range(table, len(self.starts) - 1, self.tables)
        spans = [np.arange(self.starts[at], self.starts[at + 1]) for at in firsts]
        found = spans[0] if len(spans) == 1 else np.concatenate(spans)
        return found[self.ids[found].argsort()]

    def place(self, id: int, table: int, server: int) -> int | None:
        """Where the row of an id is, if the batch has it."""
        first = server * self.tables + table
        low, high = int(self.starts[first]), int(self.starts[first + 1])
        at = low + int(np.searchsorted(self.ids[low:high], id))
        return at if at < high and self.ids[at] == id else None


class Layout:
    """Tables that are looked up together.

    Args:
        names: Of the tables, for errors.
        rows: How many rows each has.
        sharding: The same for all.
        servers: How many there are.
        homes: With ``Sharding.TABLE``: the server of each table.

    Attributes:
        is_ordered: Whether all rows found are in the order of their ids.
        packed: The same facts for the native core.
    """

    def __init__(
        self,
        names: Sequence[str],
        rows: Sequence[int],
        sharding: Sharding,
        servers: int,
        homes: Sequence[int],
    ) -> None:
        is_hashed = sharding is Sharding.HASH and servers > 1
        self.is_ordered = len(rows) == 1 and not is_hashed
        self._names = tuple(names)
        self._rows = np.array(rows, np.int64)
        self._sharding = sharding
        self._servers = servers
        self.packed = _packed(rows, sharding, servers, homes)
        self._homes = np.array(homes, np.int64)
        self._tables = np.arange(len(rows), dtype=np.int64) << ID_BITS
        shift = ID_BITS + TABLE_BITS
        starts = (np.arange(servers, dtype=np.int64) << shift)[:, None] + self._tables
        self._bounds = np.append(starts, np.iinfo(np.int64).max)
        if sharding is Sharding.TABLE:  # then the server is a function of the table
            self._tables = self._tables + (self._homes << shift)

    def find(self, ids: Sequence[Ints]) -> DistinctRows:
        """The distinct rows behind the ids of each table.

        Raises:
            IdRangeError: An id is outside of its table.
        """
        if len(ids) == 1:
            flat, keys = ids[0], self._tables[0]
            self._check(flat, self._rows[0], ids)
        else:
            lengths = [len(each) for each in ids]
            flat = np.concatenate(ids)
            self._check(flat, np.repeat(self._rows, lengths), ids)
            keys = np.repeat(self._tables, lengths)
        keys = flat + keys
        if self._sharding is not Sharding.TABLE and self._servers > 1:
            keys += self._owners(flat, ids) << (ID_BITS + TABLE_BITS)
        order = keys.argsort()
        ordered = keys[order]
        is_new = _firsts(ordered)
        inverse = np.empty(len(keys), np.int64)
        inverse[order] = is_new.cumsum() - 1
        distinct = ordered[is_new]
        starts = np.searchsorted(distinct, self._bounds)
        twice, thrice = self._repeated(ordered, is_new)
        return DistinctRows(distinct & _ID, inverse, starts, len(self._rows), twice, thrice)

    def owner_of(self, table: int, id: int) -> int:
        """The server that has a row."""
        if self._sharding is Sharding.TABLE:
            return int(self._homes[table])
        one = np.array([id], np.int64)
        return int(owners(self._sharding, int(self._rows[table]), self._servers, one)[0])

    def _repeated(self, ordered: Ints, is_new: Flags) -> tuple[Flags, Flags]:
        """Which tables have an id twice, and which have one three times."""
        twice = np.zeros(len(self._rows), np.bool_)
        thrice = twice.copy()
        is_second = ~is_new
        if is_second.any():
            tables = (ordered >> ID_BITS) & (MOST_TABLES - 1)
            twice[tables[is_second]] = True
            is_second[1:] &= is_second[:-1].copy()
            thrice[tables[is_second]] = True
        return twice, thrice

    def _owners(self, flat: Ints, ids: Sequence[Ints]) -> Ints:
        if self._sharding is Sharding.HASH or len(ids) == 1:
            return owners(self._sharding, int(self._rows[0]), self._servers, flat)
        parts = zip(self._rows, ids, strict=True)
        found = [owners(self._sharding, int(rows), self._servers, each) for rows, each in parts]
        return np.concatenate(found)

    def _check(self, flat: Ints, rows: Ints | np.int64, ids: Sequence[Ints]) -> None:
        # As unsigned numbers, negative ids are too large as well.
        wrong = flat.view(np.uint64) >= np.asarray(rows).view(np.uint64)
        if wrong.any():
            at = int(wrong.argmax())
            table = int(np.searchsorted(np.cumsum([len(each) for each in ids]), at, "right"))
            name, count = self._names[table], int(self._rows[table])
            raise IdRangeError(
                f"id {int(flat[at])} is not in table {name!r}, which has rows 0 to {count - 1}: "
                "make the table larger, or look at the ids",
                table=name,
                id=int(flat[at]),
            )


def _packed(rows: Sequence[int], sharding: Sharding, servers: int, homes: Sequence[int]) -> bytes:
    """As ``Layout`` of ``native/ps/plan.c``. Cut by rows on one server is whole on that server."""
    is_whole = sharding is Sharding.TABLE or servers == 1
    homes = homes if sharding is Sharding.TABLE else [0] * len(rows)
    kind = 0 if is_whole else 1 if sharding is Sharding.HASH else 2
    return np.array([len(rows), servers, kind, *rows, *homes], np.int64).tobytes()


def _firsts(ordered: Ints) -> Flags:
    """For each of sorted keys, whether it differs from the one before."""
    is_new = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_new[1:])
    return is_new
