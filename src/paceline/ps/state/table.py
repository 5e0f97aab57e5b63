"""One table of one server: checks ids, reads rows, applies gradients, writes rows.

Called by ``ps/state/store.py``. Checking and doing are apart: ``locate`` refuses what cannot be
done and changes nothing, so that a message is checked as a whole before its first row moves. Must
not know messages, clients or files.

[Note: reading makes no row]
A lookup of a row that was never pushed computes its first values (``ps/state/row_init.py``) and
keeps nothing: memory grows with what was trained, not with what was asked for, and whoever only
reads cannot fill a server. The price is that a row's first values are computed twice, in its first
lookup and its first push: 0.4 us a row of 64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.native import extension
from paceline.ps.protocol.table_spec import Shard, Sharding, TableSpec
from paceline.ps.state.meter import Meter
from paceline.ps.state.native_table import Entry
from paceline.ps.state.native_updates import rounding_of
from paceline.ps.state.owned_ids import OwnedIds
from paceline.ps.state.refusal import Code, Refusal
from paceline.ps.state.row_init import TORCH_DTYPES, first_rows
from paceline.ps.state.row_storage import RowStorage
from paceline.ps.state.updates import state_columns, update

BLOCK_BYTES = 1 << 19
"""Of rows; with gradient and state, a block is about two megabytes."""
_ID_BYTES = 8 + 4  # of a row's id, and of its entry in the map


@dataclass
class MemoryBudget:
    """The memory that all tables of a server may take. Counts rows, not pages."""

    limit_bytes: int
    used_bytes: int = 0

    def check(self, more_bytes: int) -> None:
        """Refuse what does not fit any more."""
        if more_bytes and self.used_bytes + more_bytes > self.limit_bytes:
            raise Refusal(
                Code.SIZE,
                f"the rows of this server take {self.used_bytes} bytes, {more_bytes} more are "
                f"asked for, and --max-bytes is {self.limit_bytes}: raise it, or add servers",
            )


class Table:
    """A table's shard on this server.

    Args:
        number: What messages call it.
        spec: What it is.
        shard: Which part of it is here.
        budget: Shared by all tables of the server.
    """

    def __init__(self, number: int, spec: TableSpec, shard: Shard, budget: MemoryBudget) -> None:
        self.number = number
        self.spec = spec
        self.shard = shard
        self.owned = OwnedIds(spec, shard)
        self.dtype = TORCH_DTYPES[spec.dtype]
        self.entry = Entry(spec, rounding_of(spec))
        self.lookups = Meter()
        self.pushes = Meter()
        self.columns = state_columns(spec, self.dtype)
        state_bytes = sum(column.width * column.dtype.itemsize for column in self.columns)
        self.row_bytes = spec.dim * self.dtype.itemsize + state_bytes + _ID_BYTES
        self.raw_dtype = np.dtype(f"V{spec.dim * self.dtype.itemsize}")
        self._budget = budget
        self._storage: RowStorage | None = None  # once there is a row

    @property
    def step(self) -> int:
        """How many pushes it has had."""
        return int(self.entry.fields.step)

    @step.setter
    def step(self, value: int) -> None:
        self.entry.fields.step = value

    @property
    def count(self) -> int:
        """How many rows have been pushed to or written."""
        return 0 if self._storage is None else self._storage.count

    @property
    def storage(self) -> RowStorage:
        """The memory of its rows, made when it is first needed."""
        return self.reserve() if self._storage is None else self._storage

    def reserve(self) -> RowStorage:
        """Have address space for its rows.

        Raises:
            Refusal: There is none.
        """
        if self._storage is None:
            self._keep(self._new_storage())
            assert self._storage is not None
        return self._storage

    def clear(self) -> None:
        """Forget all rows."""
        self._budget.used_bytes -= self.count * self.row_bytes
        self._keep(None)
        self.step = 0

    def take_over(self, other: Table) -> None:
        """Have the rows of another table of the same kind, and forget its own."""
        self._budget.used_bytes += (other.count - self.count) * self.row_bytes
        self._keep(other._storage)
        self.step = other.step

    def locate(self, ids: NDArray[np.int64]) -> NDArray[np.int32]:
        """For each id its slot, 0 for a row that has none yet.

        Raises:
            Refusal: An id is out of range, or belongs to another server.
        """
        self.owned.check_range(ids)
        return self.locate_in_range(ids)

    def locate_in_range(self, ids: NDArray[np.int64]) -> NDArray[np.int32]:
        """The same for ids that are known to be in range."""
        owned, kept = self.owned, self._storage
        is_range = self.shard.sharding is Sharding.RANGE
        if owned.is_cut and is_range:
            owned.check_owner(ids)  # the map has no place for others
        slots = np.zeros(len(ids), np.int32) if kept is None else kept.slots(ids)
        if owned.is_cut and not is_range and np.count_nonzero(slots) < len(ids):
            # A row that has a slot was checked when it got it.
            owned.check_owner(ids[slots == 0])
        return slots

    def new_bytes(self, slots: NDArray[np.int32]) -> int:
        """How much memory it takes to keep the rows that have no slot yet."""
        return (len(slots) - int(np.count_nonzero(slots))) * self.row_bytes

    def read(self, ids: NDArray[np.int64], slots: NDArray[np.int32], out: NDArray[np.void]) -> None:
        """Copy rows to ``out``, one element of ``raw_dtype`` for each. Changes nothing."""
        count = np.count_nonzero(slots)
        if count and self._storage is not None:
            self._storage.read(slots, out)
        if count < len(slots):
            missing = np.flatnonzero(slots == 0)
            out[missing] = _raw(self._first_rows(ids[missing]), self.raw_dtype)
        if self.spec.max_norm is not None and len(out):
            self._renormalise(torch.frombuffer(out, dtype=self.dtype).view(-1, self.spec.dim))

    def push(
        self, ids: NDArray[np.int64], slots: NDArray[np.int32], grad: Tensor, lr: float
    ) -> None:
        """Apply the gradient of these rows; ids are different, slots come from ``locate``."""
        slots = self.materialise(ids, slots)
        if self.spec.max_norm is not None and len(ids):
            rows = self.storage.gather(slots)[0]
            self._renormalise(rows)
            self.storage.scatter_rows(slots, rows)
        if self.spec.padding_idx is not None:
            keep = ids != self.spec.padding_idx
            slots, grad = slots[keep], grad[torch.from_numpy(keep)]
        if self.entry.is_native:
            self._update_natively(slots, grad, lr)
        else:
            self._update(slots, grad, lr)

    def _update_natively(self, slots: NDArray[np.int32], grad: Tensor, lr: float) -> None:
        if grad.data_ptr() % grad.element_size():
            grad = grad.clone()  # a frame may begin anywhere
        if not extension.native.update_rows(self.entry.raw, slots, grad.numpy(), lr):
            raise RuntimeError(f"slots and gradient are not of table {self.spec.name!r}")

    def _update(self, slots: NDArray[np.int32], grad: Tensor, lr: float) -> None:
        """Gather, update, scatter, in blocks that stay in the cache."""
        self.step += 1
        most = max(1, BLOCK_BYTES // self.raw_dtype.itemsize)
        for start in range(0, len(slots), most):
            block = slice(start, start + most)
            rows, state = self.storage.gather(slots[block])
            update(self.spec.optimizer, rows, state, grad[block], lr, self.step)
            self.storage.scatter(slots[block], rows, state)

    def write(self, ids: NDArray[np.int64], slots: NDArray[np.int32], values: Tensor) -> None:
        """Overwrite rows; their optimizer state begins anew."""
        if not len(ids):
            return
        slots = self.materialise(ids, slots)
        self.storage.scatter_rows(slots, values)
        self.storage.start_state(slots)

    def adopt(self, ids: NDArray[np.int64], rows: Tensor, state: tuple[Tensor, ...]) -> None:
        """Take rows with their state, as they were saved.

        Raises:
            Refusal: They do not fit.
        """
        slots = self.locate(ids)
        self._budget.check(self.new_bytes(slots))
        missing = np.flatnonzero(slots == 0)
        self._add(ids, slots, missing, rows[torch.from_numpy(missing)])
        if len(ids):
            self.storage.scatter(slots, rows, state)

    def materialise(self, ids: NDArray[np.int64], slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """Keep the rows that are not kept yet; returns the slots of all."""
        if np.count_nonzero(slots) < len(slots):
            missing = np.flatnonzero(slots == 0)
            self._add(ids, slots, missing, self._first_rows(ids[missing]))
        return slots

    def _add(
        self,
        ids: NDArray[np.int64],
        slots: NDArray[np.int32],
        missing: NDArray[np.intp],
        rows: Tensor,
    ) -> None:
        """Give slots to those ids that are missing, with these rows."""
        if len(missing):
            slots[missing] = self.storage.add(ids[missing], rows)
            self._budget.used_bytes += len(missing) * self.row_bytes

    def _keep(self, storage: RowStorage | None) -> None:
        """Get or drop storage: the only place, so that the entry has its addresses or none."""
        self.entry.set_storage(storage)
        self._storage = storage

    def _first_rows(self, ids: NDArray[np.int64]) -> Tensor:
        spec = self.spec
        rows = first_rows(spec.init, spec.name, spec.dim, spec.dtype, ids)
        if spec.padding_idx is not None:
            rows[torch.from_numpy(ids == spec.padding_idx)] = 0
        return rows

    def _renormalise(self, rows: Tensor) -> None:
        assert self.spec.max_norm is not None
        lines = torch.arange(len(rows))
        torch.embedding_renorm_(rows, lines, self.spec.max_norm, self.spec.norm_type)

    def _new_storage(self) -> RowStorage:
        owned, most = self.owned, self._budget.limit_bytes // self.row_bytes
        return RowStorage(owned.first, owned.last, self.spec.dim, self.dtype, self.columns, most)


def _raw(rows: Tensor, dtype: np.dtype[np.void]) -> NDArray[np.void]:
    """See [Note: rows as single elements] in ``ps/state/row_storage.py``."""
    found: NDArray[np.void] = rows.view(torch.uint8).numpy().view(dtype).reshape(-1)
    return found
