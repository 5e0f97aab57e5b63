"""What Python and the native core share of a table: facts, addresses, and its step.

Owned by a ``Table``, which tells it where it gets and drops its storage; read by ``native/ps/*.c``
as the ``pl_entry`` of ``native/ps/rows.h``, whose [Note: addresses] says why none is ever old.
Without a native core only the step is used.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from paceline.ps.protocol.optimizers import SGD, Adagrad, Adam, Optimizer, RowwiseAdagrad
from paceline.ps.protocol.table_spec import TableSpec
from paceline.ps.state.row_storage import RowStorage

_STEP = struct.Struct("<q")
# padding_idx, row_bytes, dtype, is_renormed, optimizer, is_fused, lanes
_FACTS = struct.Struct("<qIBBBBI")
# columns; eps, beta1, beta2; root; map, slots, first, span; address and bytes of each column
_STORAGE = struct.Struct("<I3dQQQqQ6Q")
LAYOUT = _STEP.format + _FACTS.format[1:] + _STORAGE.format[1:]
"""The whole of it."""
_MOST_COLUMNS = 3
_FACTS_AT = _STEP.size
_STORAGE_AT = _FACTS_AT + _FACTS.size
_BY_TORCH = 0
_NUMBERS: dict[type[Optimizer], int] = {SGD: 1, Adagrad: 2, RowwiseAdagrad: 3, Adam: 4}


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
        self.raw = bytearray(_STORAGE_AT + _STORAGE.size)
        self._optimizer = spec.optimizer
        self.is_native = rounding is not None
        self._rounding = rounding or Rounding()
        _FACTS.pack_into(
            self.raw,
            _FACTS_AT,
            *(-1 if spec.padding_idx is None else spec.padding_idx, spec.dim * spec.dtype.itemsize),
            *(spec.dtype, spec.max_norm is not None),
            _NUMBERS[type(spec.optimizer)] if self.is_native else _BY_TORCH,
            *(self._rounding.is_fused, self._rounding.lanes),
        )
        self.set_storage(None)

    @property
    def step(self) -> int:
        """How many pushes the table has had."""
        found: int = _STEP.unpack_from(self.raw)[0]
        return found

    @step.setter
    def step(self, value: int) -> None:
        _STEP.pack_into(self.raw, 0, value)

    def set_storage(self, storage: RowStorage | None) -> None:
        """Write its addresses; before it is dropped, None."""
        places = [] if storage is None else [each.place for each in storage.columns]
        map_ = (0, 0, 0, 0)
        if storage is not None:
            map_ = (storage.map_address, storage.capacity + 1, storage.first, storage.span)
        empty = [(0, 0)] * (_MOST_COLUMNS - len(places))
        numbers = (number for place in [*places, *empty] for number in place)
        facts = (len(places), *_hyperparameters(self._optimizer), self._rounding.root)
        _STORAGE.pack_into(self.raw, _STORAGE_AT, *facts, *map_, *numbers)


def _hyperparameters(optimizer: Optimizer) -> tuple[float, float, float]:
    """``eps``, ``beta1``, ``beta2``; 0 for what it has not."""
    if isinstance(optimizer, SGD):
        return 0.0, 0.0, 0.0
    betas = optimizer.betas if isinstance(optimizer, Adam) else (0.0, 0.0)
    return optimizer.eps, *betas
