"""Where rows are kept: a map from id to slot, and slabs of slots. One for each table of a server.

Called by ``ps/table.py``, which knows what rows mean; this file knows memory only.

[Note: memory that is not there yet]
Map and slabs are anonymous mappings without reservation: as long as the whole table could ever be,
made of pages that exist once they are written. So a table of any size costs nothing when it is
made, nothing is ever moved or copied when it grows, and a forked child sees it as it was
(``ps/snapshot.py``). Slots are given in order, so slabs stay dense however sparse the ids are; the
map costs 4 bytes for each id of the table whose neighbours (a page: 1,024 ids) are used.
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.ps.refusal import Code, Refusal
from paceline.ps.update import StateColumn

_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
_MAX_SLOTS = (1 << 31) - 2  # the map's entries are int32


class RowStorage:
    """Slots for rows, each with values, id and optimizer state. Slot 0 is no row, and all zeros.

    Args:
        first: The smallest id that can come.
        last: One more than the largest.
        dim: Values of a row.
        dtype: Of these.
        columns: What else each row has.
        most: So many rows at most.

    Raises:
        Refusal: There is not even the address space.
    """

    def __init__(
        self,
        first: int,
        last: int,
        dim: int,
        dtype: torch.dtype,
        columns: tuple[StateColumn, ...],
        most: int,
    ) -> None:
        self._first = first
        self.count = 0
        self.capacity = min(last - first, most, _MAX_SLOTS)
        slots = self.capacity + 1
        try:
            self._map = _mapped(last - first, torch.int32, spread=True).numpy()
            self._ids = _mapped(slots, torch.int64).numpy()
            self.rows = _mapped(slots * dim, dtype).view(slots, dim)
            self.state = tuple(
                _mapped(slots * c.width, c.dtype).view(slots, c.width) for c in columns
            )
        except (OSError, ValueError, OverflowError) as error:
            raise Refusal(
                Code.SIZE, f"no address space for {last - first} rows of {dim} values: {error}"
            ) from None
        self._columns = columns

    def slots(self, ids: NDArray[np.int64]) -> NDArray[np.int32]:
        """For each id its slot, 0 where there is none. Ids must be in range."""
        return self._map.take(ids - self._first if self._first else ids)

    def add(self, ids: NDArray[np.int64], values: Tensor) -> NDArray[np.int32]:
        """Give slots to ids that have none, with these values; returns the slots.

        Raises:
            MemoryError: More than ``most``; the caller checks before.
        """
        start, stop = self.count + 1, self.count + 1 + len(ids)
        if stop > self.capacity + 1:
            raise MemoryError(f"{stop - 1} rows do not fit into {self.capacity} slots")
        slots = np.arange(start, stop, dtype=np.int32)
        self._map[ids - self._first] = slots
        self._ids[start:stop] = ids
        self.rows[start:stop] = values
        for column, state in zip(self._columns, self.state, strict=True):
            if column.start:
                state[start:stop] = column.start
        self.count += len(ids)
        return slots

    def ids(self) -> NDArray[np.int64]:
        """The ids of all rows, in the order of their slots, which begin with 1."""
        return self._ids[1 : self.count + 1]


def _mapped(count: int, dtype: torch.dtype, spread: bool = False) -> Tensor:
    memory = mmap.mmap(-1, max(1, count * dtype.itemsize), flags=_FLAGS)
    if spread and hasattr(mmap, "MADV_NOHUGEPAGE"):
        # Touched here and there: a page of 2 MiB for each touch would be waste.
        with contextlib.suppress(OSError):  # a kernel that has no such pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=count)
