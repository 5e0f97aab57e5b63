"""Memory that the rows of a small push are gathered into, and tensors over it that are kept.

Called by ``ps/state/plain_messages.py``. To make a tensor costs more than to add up the numbers of
a small push, so tensors are kept for each number of lines that has come. One push at a time uses
the memory; it is as large as the largest, for any table, and made of pages that exist once they are
written.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.ps.state.table import Table

_MOST_KEPT = 1024


class Lines(NamedTuple):
    """Tensors over the scratch memory: one line for each row of a push.

    Args:
        rows: To be updated.
        state: As ``state_columns`` names it.
        grad: Of the rows.
        addresses: Of rows and state.
        grad_address: Of the gradient.
    """

    rows: Tensor
    state: tuple[Tensor, ...]
    grad: Tensor
    addresses: tuple[int, ...]
    grad_address: int


class Scratch:
    """Scratch memory of one server.

    Args:
        row_bytes: The most that all rows of a push have.
    """

    def __init__(self, row_bytes: int) -> None:
        # Twice: RowwiseAdagrad has 4 bytes of state for a row that may have 2.
        self._gradient, *self._columns = (
            torch.empty(2 * row_bytes, dtype=torch.uint8) for _ in range(4)
        )
        self._kept: dict[tuple[int, int], Lines] = {}

    def lines(self, table: Table, count: int) -> Lines:
        """Tensors for so many rows of a table, or of several that are alike."""
        found = self._kept.get((table.number, count))
        if found is None:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            found = self._kept[table.number, count] = self._made(table, count)
        return found

    def _made(self, table: Table, count: int) -> Lines:
        dim, dtype = table.spec.dim, table.dtype
        widths = [(dim, dtype), *((each.width, each.dtype) for each in table.columns)]
        rows, *state = (
            _matrix(memory, count, *each)
            for memory, each in zip(self._columns, widths, strict=False)
        )
        grad = _matrix(self._gradient, count, dim, dtype)
        addresses = tuple(each.data_ptr() for each in (rows, *state))
        return Lines(rows, tuple(state), grad, addresses, grad.data_ptr())


def _matrix(memory: Tensor, lines: int, width: int, dtype: torch.dtype) -> Tensor:
    return memory.view(dtype)[: lines * width].view(lines, width)
