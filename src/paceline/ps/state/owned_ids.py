"""Which ids of a table this server has, and the refusals of others. For ``ps/state/table.py``.

Must not know rows, slots or memory.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.ps.protocol.sharding import is_owner
from paceline.ps.protocol.table_spec import Shard, Sharding, TableSpec
from paceline.ps.state.refusal import Code, Refusal


class OwnedIds:
    """The ids of one shard.

    Args:
        spec: The table.
        shard: Which part of it.

    Attributes:
        first: The smallest id that can be here.
        last: One more than the largest.
        is_cut: Whether other servers have ids of the table.
    """

    def __init__(self, spec: TableSpec, shard: Shard) -> None:
        self._spec = spec
        self._shard = shard
        self.is_cut = shard.sharding is not Sharding.TABLE and shard.count > 1
        self.first, self.last = 0, spec.rows
        if shard.sharding is Sharding.RANGE:
            self.first = spec.rows * shard.index // shard.count
            self.last = spec.rows * (shard.index + 1) // shard.count

    def check_range(self, ids: NDArray[np.int64]) -> None:
        """Refuse ids that the table does not have."""
        # As unsigned numbers, negative ids are too large as well.
        if len(ids) and int(ids.view(np.uint64).max()) >= self._spec.rows:
            wrong = int(ids[(ids < 0) | (ids >= self._spec.rows)][0])
            self._refuse(wrong, f", which has rows 0 to {self._spec.rows - 1}")

    def check_owner(self, ids: NDArray[np.int64]) -> None:
        """Refuse ids of the table that another server has."""
        shard = self._shard
        mine = is_owner(shard, self._spec.rows, ids)
        if not mine.all():
            where = f"shard {shard.index} of {shard.count} ({shard.sharding.value})"
            self._refuse(int(ids[~mine][0]), f" is not on this server, which has {where}")

    def check_different(self, ids: NDArray[np.int64]) -> None:
        """Refuse ids that come twice."""
        different, counts = np.unique(ids, return_counts=True)
        if len(different) < len(ids):
            name, twice = self._spec.name, int(different[counts > 1][0])
            raise Refusal(
                Code.ID,
                f"row {twice} comes twice in one message for table {name!r}; add up the gradients "
                "of equal ids first",
                table=name,
                id=twice,
            )

    def _refuse(self, id: int, why: str) -> None:
        name = self._spec.name
        raise Refusal(Code.ID, f"row {id} of table {name!r}{why}", table=name, id=id)
