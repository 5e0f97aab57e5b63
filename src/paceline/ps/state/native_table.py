"""What Python and the native core share of a table: facts, addresses, and its step.

Owned by a ``Table``, which tells it where it gets and drops its storage; read by ``native/*.c`` as
the ``pl_entry`` of ``native/ps/rows.h``, whose [Note: addresses] says why no address is ever old.
Without a native core only the step is used.
"""

from __future__ import annotations

import struct

from paceline.ps.protocol.optimizers import SGD, Adam
from paceline.ps.protocol.table_spec import TableSpec
from paceline.ps.protocol.wire import Dtype
from paceline.ps.state.row_storage import RowStorage

_STEP = struct.Struct("<q")
# padding_idx, row_bytes, family, dtype, is_renormed, is_stepped, is_sgd
_FACTS = struct.Struct("<qIIBBBB")
# columns; map, slots, first, span; address and bytes of each column
_STORAGE = struct.Struct("<IQQqQ6Q")
_MOST_COLUMNS = 3
_FACTS_AT = _STEP.size
_STORAGE_AT = _FACTS_AT + _FACTS.size


class Entry:
    """One table's.

    Args:
        spec: What the table is.
    """

    def __init__(self, spec: TableSpec) -> None:
        self.raw = bytearray(_STORAGE_AT + _STORAGE.size)
        self._spec = spec
        self.set_family(0)

    @property
    def step(self) -> int:
        """How many pushes the table has had."""
        found: int = _STEP.unpack_from(self.raw)[0]
        return found

    @step.setter
    def step(self, value: int) -> None:
        _STEP.pack_into(self.raw, 0, value)

    def set_family(self, number: int) -> None:
        """Say which tables of the server it can be updated with: those with the same number."""
        spec = self._spec
        padding_idx = -1 if spec.padding_idx is None else spec.padding_idx
        kind = type(spec.optimizer)
        is_sgd = kind is SGD and spec.dtype is Dtype.FLOAT32
        flags = (spec.max_norm is not None, kind is Adam, is_sgd)
        row_bytes = spec.dim * spec.dtype.itemsize
        _FACTS.pack_into(self.raw, _FACTS_AT, padding_idx, row_bytes, number, spec.dtype, *flags)

    def set_storage(self, storage: RowStorage | None) -> None:
        """Write its addresses; before it is dropped, None."""
        if storage is None:
            self.raw[_STORAGE_AT:] = bytes(_STORAGE.size)
            return
        places = [each.place for each in storage.columns]
        places += [(0, 0)] * (_MOST_COLUMNS - len(places))
        _STORAGE.pack_into(
            self.raw,
            _STORAGE_AT,
            len(storage.columns),
            *(storage.map_address, storage.capacity + 1, storage.first, storage.span),
            *(number for place in places for number in place),
        )
