"""Which server a row lives on. Pure, and the same function on trainers and servers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.ps.protocol.table_spec import Shard, Sharding

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def owners(sharding: Sharding, rows: int, count: int, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each id, the index of its shard among ``count``. Ids must be in range.

    A hash is the top of a product with the golden ratio (Fibonacci hashing): consecutive ids, and
    ids with a common divisor, spread evenly.
    """
    if sharding is Sharding.TABLE or count == 1:
        return np.zeros(len(ids), np.int64)
    if sharding is Sharding.RANGE:
        bounds = np.array([rows * index // count for index in range(1, count)], np.int64)
        return np.searchsorted(bounds, ids, side="right").astype(np.int64)
    mixed = (ids.astype(np.uint64) * _GOLDEN) >> np.uint64(32)
    found: NDArray[np.int64] = ((mixed * np.uint64(count)) >> np.uint64(32)).astype(np.int64)
    return found


def is_owner(shard: Shard, rows: int, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """For each id, whether it belongs to this shard."""
    mine: NDArray[np.bool_] = owners(shard.sharding, rows, shard.count, ids) == shard.index
    return mine
