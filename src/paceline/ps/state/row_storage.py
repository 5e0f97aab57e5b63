"""Where rows are kept: a map from id to slot, and slabs of slots. One for each table of a server.

Called by ``ps/state/table.py``, which knows what rows mean; this file knows memory only.

[Note: memory that is not there yet]
Map and slabs are anonymous mappings without reservation: as long as the whole table could ever be,
made of pages that exist once they are written. So a table of any size costs nothing when it is
made, nothing is ever moved or copied when it grows, and a forked child sees it as it was
(``ps/storage/snapshot.py``). Slots are given in order, so slabs stay dense however sparse the ids
are; the map costs 4 bytes for each id of the table whose neighbours (a page: 1,024 ids) are used.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.ps.state.refusal import Code, Refusal
from paceline.ps.state.updates import StateColumn

# Older Pythons do not name it; elsewhere than on Linux, mappings are not reserved anyway.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
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
        self.first = first
        self.span = last - first
        self.count = 0
        self.capacity = min(self.span, most, _MAX_SLOTS)
        slots = self.capacity + 1
        try:
            places = _mapped(self.span, torch.int32, spread=True)
            self._map = places.numpy()
            self.map_address = places.data_ptr()
            self._ids = _mapped(slots, torch.int64).numpy()
            self._rows = Column(slots, dim, dtype)
            self._state = tuple(Column(slots, each.width, each.dtype) for each in columns)
        except (OSError, ValueError, OverflowError) as error:
            raise Refusal(
                Code.SIZE, f"no address space for {last - first} rows of {dim} values: {error}"
            ) from None
        self._starts = tuple(each.start for each in columns)

    def slots(self, ids: NDArray[np.int64]) -> NDArray[np.int32]:
        """For each id its slot, 0 where there is none. Ids must be in range."""
        return self._map.take(ids - self.first if self.first else ids)

    def add(self, ids: NDArray[np.int64], values: Tensor) -> NDArray[np.int32]:
        """Give slots to ids that have none, with these values; returns the slots.

        Raises:
            MemoryError: More than ``most``; the caller checks before.
        """
        start, stop = self.count + 1, self.count + 1 + len(ids)
        if stop > self.capacity + 1:
            raise MemoryError(f"{stop - 1} rows do not fit into {self.capacity} slots")
        slots = np.arange(start, stop, dtype=np.int32)
        self._map[ids - self.first] = slots
        self._ids[start:stop] = ids
        self._rows.tensor[start:stop] = values
        for state, first in zip(self._state, self._starts, strict=True):
            if first:
                state.tensor[start:stop] = first
        self.count += len(ids)
        return slots

    def read(self, slots: NDArray[np.int32], out: NDArray[np.void]) -> None:
        """Copy rows to ``out``, which has one element for each row."""
        self._rows.raw.take(slots, 0, out, "clip")

    def gather(self, slots: NDArray[np.int32]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Copies of rows and of their state."""
        return self._rows.gather(slots), tuple(each.gather(slots) for each in self._state)

    def scatter(self, slots: NDArray[np.int32], rows: Tensor, state: Sequence[Tensor]) -> None:
        """Write rows and their state."""
        self._rows.scatter(slots, rows)
        for column, values in zip(self._state, state, strict=True):
            column.scatter(slots, values)

    def scatter_rows(self, slots: NDArray[np.int32], rows: Tensor) -> None:
        """Write rows alone."""
        self._rows.scatter(slots, rows)

    def start_state(self, slots: NDArray[np.int32]) -> None:
        """Set the state of rows to what it begins with."""
        for column, first in zip(self._state, self._starts, strict=True):
            column.tensor[torch.from_numpy(slots).long()] = first

    @property
    def columns(self) -> tuple[Column, ...]:
        """The rows, then each kind of state."""
        return (self._rows, *self._state)

    def ids(self) -> NDArray[np.int64]:
        """The ids of all rows, in the order of their slots, which begin with 1."""
        return self._ids[1 : self.count + 1]

    def kept(self) -> tuple[Tensor, ...]:
        """All rows, then each kind of state: views of this memory, lines as in ``ids``."""
        return tuple(each.tensor[1 : self.count + 1] for each in self.columns)


class Column:
    """One kind of values that each slot has.

    [Note: rows as single elements]
    numpy copies an element of any size with one call of ``memcpy``; as rows of floats, or with
    torch's ``index_select`` and ``index_copy_``, the same takes 3 to 7 times as long.
    """

    def __init__(self, slots: int, width: int, dtype: torch.dtype) -> None:
        flat = _mapped(slots * width, dtype)
        self.tensor = flat.view(slots, width)
        self._width = width
        self.raw = flat.view(torch.uint8).numpy().view(f"V{width * dtype.itemsize}")

    def gather(self, slots: NDArray[np.int32]) -> Tensor:
        """Copies of these lines."""
        found = np.empty(len(slots), self.raw.dtype)
        self.raw.take(slots, 0, found, "clip")
        return torch.frombuffer(found, dtype=self.tensor.dtype).view(-1, self._width)

    def scatter(self, slots: NDArray[np.int32], values: Tensor) -> None:
        """Overwrite these lines. Values must be contiguous."""
        lines = values.view(torch.uint8).numpy().view(self.raw.dtype)
        self.raw.put(slots, lines, "clip")


def _mapped(count: int, dtype: torch.dtype, spread: bool = False) -> Tensor:
    memory = mmap.mmap(-1, max(1, count * dtype.itemsize), flags=_FLAGS)
    if spread and hasattr(mmap, "MADV_NOHUGEPAGE"):
        # Touched here and there: a page of 2 MiB for each touch would be waste.
        with contextlib.suppress(OSError):  # a kernel that has no such pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=count)
