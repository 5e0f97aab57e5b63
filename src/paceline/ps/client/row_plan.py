"""Which rows a batch needs, and from which server: pure numpy, no message, no torch.

Called by ``ps/client/message_plan.py`` where there is no native core, and where that says no.
Distinct rows stand in the order of the messages (by server, table, id), so a server's share is a
slice of everything, and so is a table's share of that.
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


@dataclass(frozen=True)
class DistinctRows:
    """The distinct rows of a batch.

    Args:
        ids: By server, then by table, then by id.
        inverse: For each id of the batch, where its row is in ``ids``.
        starts: Where the rows of table ``t`` on server ``s`` begin: ``starts[s * tables + t]``;
            one more at the end.
        tables: How many tables.
        has_pairs: Which tables have an id twice or more often in this batch.
        has_triples: The same for three times.
    """

    ids: Ints
    inverse: Ints
    starts: Ints
    tables: int
    has_pairs: Flags
    has_triples: Flags

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
        table_servers: With ``Sharding.TABLE``: the server of each table.

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
        table_servers: Sequence[int],
    ) -> None:
        is_hashed = sharding is Sharding.HASH and servers > 1
        self.is_ordered = len(rows) == 1 and not is_hashed
        self._names = tuple(names)
        self._rows = tuple(rows)
        self._sharding = sharding
        self._servers = servers
        self._table_servers = tuple(table_servers)
        self.packed = _packed(rows, sharding, servers, table_servers)

    def find(self, ids: Sequence[Ints]) -> DistinctRows:
        """The distinct rows behind the ids of each table.

        Raises:
            IdRangeError: An id is outside of its table.
        """
        tables = len(ids)
        for table, each in enumerate(ids):
            self._check(table, each)
        values, inverses, counts = zip(
            *(np.unique(each, return_inverse=True, return_counts=True) for each in ids), strict=True
        )
        # In which of ``servers x tables`` each row is.
        cells = [self._owners(table, each) * tables + table for table, each in enumerate(values)]
        cell = np.concatenate(cells)
        order = cell.argsort(kind="stable")
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        firsts = np.cumsum([0, *map(len, values)])
        inverse = [places[first:][each] for first, each in zip(firsts, inverses, strict=False)]
        repeats = np.array([each.max(initial=0) for each in counts])
        return DistinctRows(
            np.concatenate(values)[order],
            np.concatenate(inverse),
            np.searchsorted(cell[order], np.arange(self._servers * tables + 1)),
            tables,
            repeats >= 2,
            repeats >= 3,
        )

    def owner_of(self, table: int, id: int) -> int:
        """The server that has a row."""
        return int(self._owners(table, np.array([id], np.int64))[0])

    def _owners(self, table: int, ids: Ints) -> Ints:
        if self._sharding is Sharding.TABLE:
            return np.full(len(ids), self._table_servers[table], np.int64)
        return owners(self._sharding, self._rows[table], self._servers, ids)

    def _check(self, table: int, ids: Ints) -> None:
        name, rows = self._names[table], self._rows[table]
        wrong = (ids < 0) | (ids >= rows)
        if wrong.any():
            id = int(ids[wrong.argmax()])
            raise IdRangeError(
                f"index out of range in self: input of table {name!r} takes value {id} which is "
                f"not in the valid range [0, {rows}). Make the table larger, or look at the ids",
                table=name,
                id=id,
            )


def _packed(
    rows: Sequence[int], sharding: Sharding, servers: int, table_servers: Sequence[int]
) -> bytes:
    """As ``Layout`` of ``native/ps/plan.c``. Cut by rows on one server is whole on that server."""
    is_whole = sharding is Sharding.TABLE or servers == 1
    table_servers = table_servers if sharding is Sharding.TABLE else [0] * len(rows)
    kind = 0 if is_whole else 1 if sharding is Sharding.HASH else 2
    return np.array([len(rows), servers, kind, *rows, *table_servers], np.int64).tobytes()
