"""What Python and the native core share of a table: facts, addresses, and its step.

Owned by a ``Table``, which tells it where it gets and drops its storage; read by ``native/ps/*.c``
as the ``pl_entry`` of ``native/ps/rows.h``, whose [Note: addresses] says why none is ever old.
Without a native core only the step is used.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from paceline.ps.protocol.optimizers import SGD, Adagrad, Adam, Optimizer, RowwiseAdagrad
from paceline.ps.protocol.table_spec import TableSpec
from paceline.ps.state.row_storage import RowStorage

_NUMBERS: dict[type[Optimizer], int] = {SGD: 1, Adagrad: 2, RowwiseAdagrad: 3, Adam: 4}
"""``pl_optimizer`` in ``native/ps/rows.h``; 0 leaves pushes to torch."""


class ColumnFields(ctypes.Structure):
    """``pl_column``: an address, and the bytes of one slot."""

    _fields_ = (("address", ctypes.c_uint64), ("bytes", ctypes.c_uint64))


class EntryFields(ctypes.Structure):
    """``pl_entry``."""

    _fields_ = (
        ("step", ctypes.c_int64),
        ("padding_idx", ctypes.c_int64),
        ("row_bytes", ctypes.c_uint32),
        ("dtype", ctypes.c_uint8),
        ("is_renormed", ctypes.c_uint8),
        ("optimizer", ctypes.c_uint8),
        ("is_fused", ctypes.c_uint8),
        ("lanes", ctypes.c_uint32),
        ("columns", ctypes.c_uint32),
        ("eps", ctypes.c_double),
        ("beta1", ctypes.c_double),
        ("beta2", ctypes.c_double),
        ("root", ctypes.c_uint64),
        ("map", ctypes.c_uint64),
        ("slots", ctypes.c_uint64),
        ("first", ctypes.c_int64),
        ("span", ctypes.c_uint64),
        ("column", 3 * ColumnFields),
    )


class Rounding(NamedTuple):
    """How the native core has to compute to get torch's bits on this machine.

    Args:
        is_fused: A product is added with one rounding, not two.
        lanes: In which a row is added up.
        root: The address of a function for roots, as MKL's ``vmsSqrt``; 0 takes the nearest number.
    """

    is_fused: bool = False
    lanes: int = 1
    root: int = 0


class Entry:
    """One table's.

    Args:
        spec: What the table is.
        rounding: For the native core to update rows; None leaves that to torch.
    """

    def __init__(self, spec: TableSpec, rounding: Rounding | None) -> None:
        self.raw = bytearray(ctypes.sizeof(EntryFields))
        self.fields = fields = EntryFields.from_buffer(self.raw)
        fields.padding_idx = -1 if spec.padding_idx is None else spec.padding_idx
        fields.row_bytes = spec.dim * spec.dtype.itemsize
        fields.dtype = spec.dtype
        fields.is_renormed = spec.max_norm is not None
        fields.eps = getattr(spec.optimizer, "eps", 0.0)
        fields.beta1, fields.beta2 = getattr(spec.optimizer, "betas", (0.0, 0.0))
        if rounding is not None:
            fields.optimizer = _NUMBERS[type(spec.optimizer)]
            fields.is_fused, fields.lanes, fields.root = rounding

    @property
    def is_native(self) -> bool:
        """Whether the native core updates rows."""
        return bool(self.fields.optimizer)

    def set_storage(self, storage: RowStorage | None) -> None:
        """Write its addresses; before it is dropped, None."""
        fields = self.fields
        if storage is None:
            fields.map = fields.columns = 0
            return
        fields.map, fields.slots = storage.map_address, storage.capacity + 1
        fields.first, fields.span = storage.first, storage.span
        fields.columns = len(storage.columns)
        for at, column in enumerate(storage.columns):
            fields.column[at] = ColumnFields(column.tensor.data_ptr(), column.raw.itemsize)
