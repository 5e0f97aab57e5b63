"""Whether the native core gets torch's bits here: tried out, once for each optimizer.

Called by ``ps/state/table.py`` when a table is made. ``native/ps/update.c`` has the optimizers of
``ps/state/updates.py`` once more; what it cannot know is how this build of torch rounds on this
machine. If no way gives torch's bits, torch does the updates.
"""

from __future__ import annotations

import ctypes
import functools
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paceline.native import extension
from paceline.ps.protocol.optimizers import Optimizer
from paceline.ps.protocol.table_spec import TableSpec
from paceline.ps.protocol.wire import Dtype
from paceline.ps.state.native_table import Entry, Rounding
from paceline.ps.state.row_storage import RowStorage
from paceline.ps.state.updates import state_columns, update

_DIMS = (1, 3, 7, 16, 21, 64, 130, 1021)
_ROWS = 5
_STEPS = 3


def rounding_of(spec: TableSpec) -> Rounding | None:
    """How the native core updates this table; None if it cannot, or is not there."""
    if extension.native is None or spec.dtype is not Dtype.FLOAT32:
        return None
    return _found(spec.optimizer)


@functools.cache
def _found(optimizer: Optimizer) -> Rounding | None:
    return next((each for each in roundings() if _is_exact(optimizer, each)), None)


def roundings() -> list[Rounding]:
    """All that may be torch's, the usual ones first."""
    roots = dict.fromkeys((_mkl_root(), 0))
    return [Rounding(*each) for each in product((True, False), (8, 16, 4, 1), roots)]


def _mkl_root() -> int:
    """The address of the function by which torch takes roots if it was built with MKL, or 0."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        found = ctypes.CDLL(str(library)).vmsSqrt  # is loaded already
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(found, ctypes.c_void_p).value or 0


def _is_exact(optimizer: Optimizer, rounding: Rounding) -> bool:
    return all(is_exact(optimizer, rounding, dim, _ROWS) for dim in _DIMS)


def is_exact(optimizer: Optimizer, rounding: Rounding, dim: int, rows: int) -> bool:
    """Push drawn gradients to drawn rows both ways; say whether all bits are the same."""
    spec = TableSpec("t", rows, dim, optimizer=optimizer)
    storage = RowStorage(0, rows, dim, torch.float32, state_columns(spec, torch.float32), rows)
    generator = torch.Generator().manual_seed(dim)
    slots = storage.add(np.arange(rows), _drawn(rows, dim, generator))
    entry = Entry(spec, rounding)
    entry.set_storage(storage)
    expected, *state = (kept.clone() for kept in storage.kept())
    for step in range(1, _STEPS + 1):
        grad = _drawn(rows, dim, generator)
        lr = 0.05 * step
        update(optimizer, expected, tuple(state), grad.clone(), lr, step)  # may change it
        if not extension.native.update_rows(entry.raw, slots, grad.numpy(), lr):
            return False
    return all(
        torch.equal(mine.view(torch.int32), torchs.view(torch.int32))
        for mine, torchs in zip(storage.kept(), (expected, *state), strict=True)
    )


def _drawn(rows: int, dim: int, generator: torch.Generator) -> Tensor:
    """Numbers of all sizes, zeros included."""
    exponents = torch.randint(-20, 10, (rows, dim), generator=generator)
    found = torch.randn((rows, dim), generator=generator) * 2.0**exponents
    found[0, ::7] = 0
    return found
