"""What the native core knows of a table: facts and addresses, as ``native/rows.c`` reads them.

Called by ``ps/table.py``, which owns an entry and writes it where it gets or drops its storage; see
[Note: addresses] in ``native/rows.c``. Without a native core nobody reads it.
"""

from __future__ import annotations

import struct

from paceline.ps.shard import RowStorage
from paceline.ps.spec import TableSpec

# map, slots, first, span, padding_idx, row_bytes, dtype, is_renormed, columns,
# then address and bytes of each column
_ENTRY = struct.Struct("<QQqQqIBBH6Q")
_MOST_COLUMNS = 3


def pack_entry(spec: TableSpec, storage: RowStorage | None) -> bytes:
    """The entry of a table; without storage it has no address."""
    padding_idx = -1 if spec.padding_idx is None else spec.padding_idx
    facts = (
        padding_idx,
        spec.dim * spec.dtype.itemsize,
        spec.dtype,
        spec.max_norm is not None,
    )
    if storage is None:
        return _ENTRY.pack(0, 0, 0, 0, *facts, 0, *(0,) * 2 * _MOST_COLUMNS)
    columns = [each.place for each in storage.columns]
    nothing = [(0, 0)] * (_MOST_COLUMNS - len(columns))
    places = [number for place in (*columns, *nothing) for number in place]
    first, span = storage.first, storage.span
    slots = storage.capacity + 1
    return _ENTRY.pack(storage.map_address, slots, first, span, *facts, len(columns), *places)
