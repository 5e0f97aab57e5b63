"""Rows become bags, and gradients of bags gradients of rows: torch's own kernels on a small matrix.

Called by ``ps/tables.py``. Modes, weights, offsets, padding and empty bags are torch's; places in
the matrix of a batch stand for ids. The bags of all tables of a group are pooled by one call.

[Note: the same bits]
*Forward*: a bag is added up in the order of its ids, whatever else is in the call. *Backward*:
torch sorts the ids of a call, not stably, and adds up the gradients of equal ids in the order that
results. That order follows from the number of ids and from how they compare, so a table by itself,
with places in the order of its ids, gives what a local ``nn.EmbeddingBag`` gives. Together with
other tables, or with places in the order of servers, the order among equal ids may differ. It
matters for three equal ids in a sum (a + b is b + a), and for two where each is scaled first
(mean, weights, frequency): only tables with such ids get a call of their own. ``max`` and
``nn.Embedding`` do not sort.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.ps.inputs import FlatBags
from paceline.ps.parts import RowsPart
from paceline.ps.plan import Flags, Ints
from paceline.torch_private import (
    embedding_backward,
    embedding_bag_backward,
    embedding_bag_forward,
    embedding_bag_weights_backward,
)

_MODES = {"sum": 0, "mean": 1, "max": 2}


@dataclass(frozen=True)
class _Call:
    """One call of ``embedding_bag``: what went in, and what came out for its backward."""

    places: Tensor
    offsets: Tensor
    weights: Tensor | None
    padding: int
    offset2bag: Tensor
    bag_size: Tensor
    max_indices: Tensor


class Pool:
    """Pools one part of a batch, and finds the gradient of its rows.

    Args:
        part: What is pooled.
    """

    def __init__(self, part: RowsPart) -> None:
        self.part = part
        self._inputs = part.inputs
        self._kin = part.group.kin
        self._call: _Call | None = None
        self._rows: Tensor | None = None

    def forward(self, rows: Tensor) -> list[Tensor]:
        """What each table of the part makes of its rows."""
        inputs = self._inputs
        rows = rows.to(inputs[0].device)
        places = torch.from_numpy(self.part.found.inverse).to(rows.device)
        if inputs[0].offsets is None:
            return [F.embedding(places.view(inputs[0].shape), rows)]
        offsets = torch.from_numpy(_offsets(inputs)).to(rows.device)
        weights, padding = _weights(inputs), self._padding()
        kin = self._kin
        pooled, *found = embedding_bag_forward(
            *(rows, places, offsets, kin.scale_grad_by_freq, _MODES[kin.mode], kin.sparse),
            *(weights, False, padding),
        )
        self._call = _Call(places, offsets, weights, padding, *found)
        if weights is not None and weights.requires_grad:
            self._rows = rows
        return _cut(pooled, [each.bags for each in inputs])

    def backward(self, gradients: Sequence[Tensor | None]) -> Tensor | None:
        """The gradient of the rows, None if no table has one. Notes which tables have one."""
        is_used = np.array([gradient is not None for gradient in gradients])
        if not is_used.any():
            return None
        self.part.is_used = None if is_used.all() else is_used
        if self._call is None:
            return self._backward_of_embedding(gradients[0])
        whole = self._joined(gradients)
        apart = self._apart()
        count = len(self.part.found.ids)
        if apart[is_used].all():
            rows = whole.new_zeros((count, self._kin.dim))
        else:
            rows = self._backward(self._call, whole, count)
        for table in np.flatnonzero(apart & is_used).tolist():
            self._backward_of_table(table, gradients[table], rows)
        return rows

    def weights_backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradient of the weights of each table, None where none is wanted."""
        call = self._call
        if self._rows is None or call is None:
            return [None] * len(gradients)
        found = embedding_bag_weights_backward(
            *(self._joined(gradients), self._rows, call.places, call.offsets, call.offset2bag),
            *(_MODES["sum"], call.padding),
        )
        return list(found.split([len(each.ids) for each in self._inputs]))

    def _backward(self, call: _Call, gradient: Tensor, count: int) -> Tensor:
        kin = self._kin
        found: Tensor = embedding_bag_backward(
            *(gradient, call.places, call.offsets, call.offset2bag, call.bag_size),
            *(call.max_indices, count, kin.scale_grad_by_freq, _MODES[kin.mode], kin.sparse),
            *(call.weights, call.padding),
        )
        return found.coalesce().to_dense() if kin.sparse else found

    def _backward_of_table(self, table: int, gradient: Tensor | None, rows: Tensor) -> None:
        """One table by itself, with places in the order of its ids."""
        assert self._call is not None
        assert gradient is not None
        order = self.part.found.places(table)
        rank = np.empty(len(self.part.found.ids), np.int64)
        rank[order] = np.arange(len(order))
        call = self._call_of_table(self._call, table, rank)
        rows[torch.from_numpy(order)] = self._backward(call, gradient.contiguous(), len(order))

    def _call_of_table(self, call: _Call, table: int, rank: Ints) -> _Call:
        before = self._inputs[:table]
        first = sum(len(each.ids) for each in before)
        ids = slice(first, first + len(self._inputs[table].ids))
        first = sum(each.bags for each in before)
        bags = slice(first, first + self._inputs[table].bags)
        offsets = self._inputs[table].offsets
        assert offsets is not None
        return _Call(
            torch.from_numpy(rank[self.part.found.inverse[ids]]).to(call.places.device),
            torch.from_numpy(offsets).to(call.places.device),
            None if call.weights is None else call.weights[ids],
            int(rank[call.padding]) if 0 <= call.padding < len(rank) else call.padding,
            call.offset2bag[ids] - first if len(call.offset2bag) else call.offset2bag,
            call.bag_size[bags],
            call.max_indices,
        )

    def _backward_of_embedding(self, gradient: Tensor | None) -> Tensor:
        assert gradient is not None
        places = torch.from_numpy(self.part.found.inverse).to(gradient.device)
        found: Tensor = embedding_backward(
            *(gradient, places.view(self._inputs[0].shape), len(self.part.found.ids)),
            *(self._padding(), self._kin.scale_grad_by_freq, self._kin.sparse),
        )
        return found.coalesce().to_dense() if self._kin.sparse else found

    def _apart(self) -> Flags:
        """Which tables need a backward of their own; see the note above."""
        kin, found = self._kin, self.part.found
        if kin.mode == "max" or self.part.group.layout.is_ordered:
            return np.zeros(found.tables, np.bool_)
        if kin.sparse:
            return np.ones(found.tables, np.bool_)
        is_scaled = kin.mode == "mean" or kin.is_weighted or kin.scale_grad_by_freq
        return found.twice if is_scaled else found.thrice

    def _padding(self) -> int:
        """Where the padding row is in the matrix, or -1; only a table that is alone has one.

        A batch without it gets a place behind the last row: torch takes another way through its
        kernel, and to other bits, when there is a padding at all.
        """
        group = self.part.group
        padding = group.places[0].padding
        if padding is None:
            return -1
        place = self.part.found.place(padding, 0, group.layout.owner_of(0, padding))
        return len(self.part.found.ids) if place is None else place

    def _joined(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """The gradient of all bags, zeros for tables without one."""
        if len(gradients) == 1 and gradients[0] is not None:
            return gradients[0].contiguous()
        like = next(gradient for gradient in gradients if gradient is not None)
        return torch.cat(
            [
                like.new_zeros((each.bags, self._kin.dim)) if gradient is None else gradient
                for gradient, each in zip(gradients, self._inputs, strict=True)
            ]
        )


def _offsets(inputs: Sequence[FlatBags]) -> Ints:
    """Where bags begin in the ids of all tables, one table after the other."""
    starts = [each.offsets for each in inputs if each.offsets is not None]
    if len(starts) == 1:
        return starts[0]
    offsets = np.concatenate(starts)
    ends = np.cumsum([0, *(len(each.ids) for each in inputs[:-1])])
    offsets += np.repeat(ends, [each.bags for each in inputs])
    return offsets


def _weights(inputs: Sequence[FlatBags]) -> Tensor | None:
    weights = [each.weights for each in inputs if each.weights is not None]
    if not weights:
        return None
    return weights[0] if len(weights) == 1 else torch.cat(weights)


def _cut(pooled: Tensor, bags: Sequence[int]) -> list[Tensor]:
    """The bags of each table. Not views for autograd: users may change one in place."""
    if len(bags) == 1:
        return [pooled]
    storage, dim, at = pooled.untyped_storage(), pooled.shape[1], 0
    outputs = []
    for count in bags:
        outputs.append(pooled.new_empty(0).set_(storage, at, (count, dim), (dim, 1)))
        at += count * dim
    return outputs
