"""Bags that are pooled on the server, by the operations the trainer would use: the same bits.

Made by ``ps/state/validate.py`` for tables that are here as a whole, used by ``ps/state/store.py``.
Equal ids are merged, their rows make a small matrix, and ``F.embedding_bag`` pools it; the gradient
of that matrix is what autograd says.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from paceline.ps.protocol.wire import Mode
from paceline.ps.state.table import Table

_MODES = {Mode.SUM: "sum", Mode.MEAN: "mean"}


class SectionBags:
    """The bags of one section, as in ``nn.EmbeddingBag``.

    Args:
        table: Whose rows.
        mode: Sum or mean.
        ids: Of all bags, one after the other.
        offsets: Where each bag begins.
        weights: One for each id, or None.
    """

    def __init__(
        self,
        table: Table,
        mode: Mode,
        ids: NDArray[np.int64],
        offsets: NDArray[np.int64],
        weights: Tensor | None,
    ) -> None:
        self._table = table
        self._mode = _MODES[mode]
        self.ids, inverse = np.unique(ids, return_inverse=True)
        self._inverse = torch.from_numpy(inverse)
        self._offsets = torch.from_numpy(offsets.copy())
        self._weights = weights
        self._padding, self._lines = self._place_padding()

    def _place_padding(self) -> tuple[int | None, int]:
        """Which line of the matrix is the padding, if the table has one; and how many there are.

        Bags without it get a line for it behind the others: torch takes another way through its
        kernel, and to other bits, when there is a padding at all.
        """
        wanted = self._table.spec.padding_idx
        lines = len(self.ids)
        if wanted is None:
            return None, lines
        line = int(np.searchsorted(self.ids, wanted))
        if line < lines and self.ids[line] == wanted:
            return line, lines
        return lines, lines + 1

    def pooled(self, slots: NDArray[np.int32], out: Tensor) -> None:
        """Pool rows into ``out``, one line for each bag; ``slots`` are those of ``self.ids``."""
        if not len(self.ids):
            out.zero_()
            return
        distinct = len(self.ids)
        raw = np.empty(self._lines, self._table.raw_dtype)
        self._table.read(self.ids, slots, raw[:distinct])
        rows = torch.frombuffer(raw, dtype=self._table.dtype).view(-1, self._table.spec.dim)
        rows[distinct:] = 0
        out.copy_(self._pool(rows))

    def gradient(self, grad: Tensor) -> Tensor:
        """The gradient of the rows of ``self.ids``, from that of the bags."""
        # It does not depend on what stands in the rows.
        rows = torch.zeros((self._lines, self._table.spec.dim), dtype=self._table.dtype)
        if not len(self.ids):
            return rows[:0]
        rows.requires_grad_()
        (found,) = torch.autograd.grad(self._pool(rows), rows, grad)
        return found[: len(self.ids)]

    def _pool(self, rows: Tensor) -> Tensor:
        return F.embedding_bag(
            self._inverse,
            rows,
            self._offsets,
            mode=self._mode,
            per_sample_weights=self._weights,
            padding_idx=self._padding,
        )
