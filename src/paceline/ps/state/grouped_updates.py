"""Pushes to several tables at once: one call of the optimizer for all tables that are alike.

Called by ``ps/state/store.py``. A trainer's message has a few rows for each of many tables, and
calling torch costs more than adding up so few numbers: tables with the same optimizer, shape,
learning rate and step have their rows gathered into one scratch matrix, are updated together and
put back. Large pushes go through it in blocks that stay in the cache. Both change no bit, because
every operation is on single values or single rows (``tests/ps/state/test_grouped_updates.py``).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.ps.protocol.optimizers import Adam
from paceline.ps.state.row_storage import Column
from paceline.ps.state.updates import update
from paceline.ps.state.validate import Share

_BLOCK_BYTES = 1 << 19
"""Of rows; with gradient and state, a block is about two megabytes."""

Columns = tuple[Column, ...]


def push_all(shares: Sequence[Share]) -> None:
    """Apply all gradients of one checked PUSH."""
    for (is_plain, *_), group in groupby(shares, _likeness):
        alike = list(group)
        start_ns = time.perf_counter_ns()
        if is_plain:
            _push_alike(alike)
        else:
            for share in alike:
                share.table.push(share.ids, share.slots, share.gradient, share.section.lr)
        end_ns = time.perf_counter_ns()
        each_ns = (end_ns - start_ns) // len(alike)
        for share in alike:
            share.table.pushes.add(share.section.ids, end_ns - each_ns, end_ns)


def _likeness(share: Share) -> tuple[object, ...]:
    """Equal for shares that can be pushed together; the first says whether there are such."""
    table = share.table
    if not share.is_plain:
        return (False,)
    spec = table.spec
    step = table.step if type(spec.optimizer) is Adam else 0  # the others do not look at it
    return (True, spec.optimizer, spec.dim, spec.dtype, share.section.lr, step)


def _push_alike(shares: Sequence[Share]) -> None:
    first = shares[0].table
    for share in shares:
        share.table.step += 1
    most = max(1, _BLOCK_BYTES // first.raw_dtype.itemsize)
    if sum(map(len, (share.ids for share in shares))) <= most:
        _push_block(shares, [share.table.materialise(share.ids, share.slots) for share in shares])
        return
    for share in shares:
        for start in range(0, len(share.ids), most):
            part = share.part(start, min(start + most, len(share.ids)))
            _push_block([part], [part.table.materialise(part.ids, part.slots)])


def _push_block(shares: Sequence[Share], slots: Sequence[NDArray[np.int32]]) -> None:
    """Gather, update, scatter. The gradients lie one behind the other in the message."""
    total = sum(map(len, slots))
    if not total:
        return
    first = shares[0]
    table = first.table
    columns = [share.table.storage.columns for share in shares]
    scratch = [np.empty(total, column.raw.dtype) for column in columns[0]]
    for part, here, each in _parts(slots, columns):
        for column, space in zip(each, scratch, strict=True):
            column.raw.take(here, 0, space[part], "clip")
    rows, *state = (
        column.as_tensor(space) for column, space in zip(columns[0], scratch, strict=True)
    )
    grad: Tensor = torch.frombuffer(
        first.frame, dtype=table.dtype, count=total * table.spec.dim, offset=first.offset
    ).view(total, table.spec.dim)
    update(table.spec.optimizer, rows, tuple(state), grad, first.section.lr, table.step)
    for part, here, each in _parts(slots, columns):
        for column, space in zip(each, scratch, strict=True):
            column.raw.put(here, space[part], "clip")


def _parts(
    slots: Sequence[NDArray[np.int32]], columns: Sequence[Columns]
) -> Iterator[tuple[slice, NDArray[np.int32], Columns]]:
    """For each table: its part of the scratch matrix, its slots, its columns."""
    at = 0
    for here, each in zip(slots, columns, strict=True):
        yield slice(at, at + len(here)), here, each
        at += len(here)
