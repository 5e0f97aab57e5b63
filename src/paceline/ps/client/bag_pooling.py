"""Rows become bags, and gradients of bags gradients of rows: torch's own kernels on a small matrix.

Called by ``ps/client/batch_exchange.py``. Modes, weights, offsets, padding and empty bags are
torch's; places in the matrix of a batch stand for ids. The bags of all tables of a group are pooled
by one call.

[Note: the same bits]
*Forward*: a bag is added up in the order of its ids, whatever else is in the call. *Backward*:
torch sorts the ids of a call, not stably, and adds up the gradients of equal ids in the order that
results. That order follows from the number of ids and from how they compare, so a table by itself,
with places in the order of its ids, gives what a local ``nn.EmbeddingBag`` gives. Together with
other tables, or with places in the order of servers, the order among equal ids may differ. It
matters for three equal ids in a sum (a + b is b + a), and for two where each is scaled first
(mean, weights, frequency): only tables with such ids get a call of their own. ``max`` and
``nn.Embedding`` do not sort.

Tables with the same bags have one backward, side by side (see the note in
``ps/client/message_plan.py``): by one call where nothing is scaled, because ``1 * x + y`` is
rounded once however wide a row is; by one call each where something is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.ps.client.batch import FlatBags
from paceline.ps.client.message_parts import RowsPart
from paceline.ps.client.message_plan import NativePlan
from paceline.ps.client.row_plan import Flags, Ints
from paceline.ps.protocol.wire import Frame
from paceline.torch_private.modules import (
    embedding_backward,
    embedding_bag_backward,
    embedding_bag_dense_backward,
    embedding_bag_forward,
    embedding_bag_weights_backward,
)

_MODES = {"sum": 0, "mean": 1, "max": 2}
_CPU = torch.device("cpu")


class _Call(NamedTuple):
    """One call of ``embedding_bag``: what went in, and what came out for its backward."""

    places: Tensor
    offsets: Tensor
    weights: Tensor | None
    padding: int
    offset2bag: Tensor
    bag_size: Tensor
    max_indices: Tensor


class BagPooling:
    """Pools one part of a batch, and finds the gradient of its rows.

    Args:
        part: What is pooled.
    """

    def __init__(self, part: RowsPart) -> None:
        self.part = part
        self._plan = part.plan
        self._inputs = part.inputs
        self._key = part.group.key
        self._call: _Call | None = None
        self._rows: Tensor | None = None

    def forward(self, rows: Tensor) -> Sequence[Tensor]:
        """What each table of the part makes of its rows."""
        inputs, plan, key = self._inputs, self._plan, self._key
        places, offsets = plan.places, plan.offsets
        device = inputs[0].device
        if device != _CPU:
            rows, places, offsets = rows.to(device), places.to(device), offsets.to(device)
        if inputs[0].offsets is None:
            return [F.embedding(places.view(inputs[0].shape), rows)]
        weights = _weights(inputs) if key.is_weighted else None
        padding = self._padding()
        pooled, offset2bag, *found = embedding_bag_forward(
            *(rows, places, offsets, key.scale_grad_by_freq, _MODES[key.mode], key.sparse),
            *(weights, False, padding),
        )
        self._call = _Call(places, offsets, weights, padding, offset2bag, *found)
        if weights is not None and weights.requires_grad:
            self._rows = rows
        return _cut(pooled, [each.bags for each in inputs])

    def backward(
        self, gradients: Sequence[Tensor | None], scale: float = 1.0
    ) -> Sequence[Frame] | None:
        """The gradient of the rows as each server gets it, None if no table has one.

        Notes which tables have one.
        """
        given = [gradient for gradient in gradients if gradient is not None]
        if not given:
            return None
        is_complete = len(given) == len(gradients)
        self.part.is_used = None if is_complete else np.array([g is not None for g in gradients])
        if is_complete and self._is_one_backward():
            assert isinstance(self._plan, NativePlan)
            lines = _scaled(self._backward_of_shared(self._plan, given), scale)
            return self._plan.cut(lines, self.part.group.row_bytes)
        return self.part.gradient(_scaled(self._backward_of_rows(gradients), scale))

    def _backward_of_rows(self, gradients: Sequence[Tensor | None]) -> Tensor:
        if self._call is None:
            return self._backward_of_embedding(gradients[0])
        return self._backward_of_tables(self._call, gradients)

    def weights_backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradient of the weights of each table, None where none is wanted."""
        call = self._call
        if self._rows is None or call is None:
            return [None] * len(gradients)
        found = embedding_bag_weights_backward(
            *(self._joined(gradients), self._rows, call.places, call.offsets, call.offset2bag),
            *(_MODES["sum"], call.padding),
        )
        return list(found.split([each.count for each in self._inputs]))

    def _backward(self, call: _Call, gradient: Tensor, count: int) -> Tensor:
        """Of all tables, or of one: with the bag of each id, unless torch computes that here."""
        key = self._key
        found: Tensor = embedding_bag_backward(
            *(gradient, call.places, call.offsets, call.offset2bag, call.bag_size),
            *(call.max_indices, count, key.scale_grad_by_freq, _MODES[key.mode], key.sparse),
            *(call.weights, call.padding),
        )
        return found.coalesce().to_dense() if key.sparse else found

    def _is_one_backward(self) -> bool:
        key, plan = self._key, self._plan
        is_here = self._inputs[0].device == _CPU
        if not plan.has_shared_bags or not is_here or key.sparse or key.mode == "max":
            return False
        # By one call always, by one call each where there must be one each anyway.
        return not key.is_scaled or 1 in plan.repeats

    def _backward_of_shared(self, plan: NativePlan, gradients: list[Tensor]) -> Tensor:
        """Lines of the gradients of all tables' rows, one for each id."""
        assert self._call is not None
        key, call, count = self._key, self._call, plan.distinct // len(gradients)
        ranks, bag_of = plan.ranks, plan.first_bag_of

        def lines(gradient: Tensor, weights: Tensor | None) -> Tensor:
            found: Tensor = embedding_bag_dense_backward(
                *(gradient, ranks, bag_of, call.bag_size, call.max_indices, count),
                *(key.scale_grad_by_freq, _MODES[key.mode], weights, -1),
            )
            return found

        if not key.is_scaled:
            return lines(torch.cat(gradients, 1), None)
        weights: Any = repeat(None) if call.weights is None else call.weights.split(len(ranks))
        pairs = zip(gradients, weights, strict=False)
        return torch.cat([lines(gradient.contiguous(), own) for gradient, own in pairs], 1)

    def _backward_of_tables(self, call: _Call, gradients: Sequence[Tensor | None]) -> Tensor:
        """All tables by one call, or those for which that would change a bit by their own."""
        is_used = np.array([gradient is not None for gradient in gradients])
        whole = self._joined(gradients)
        apart = self._apart()
        if apart[is_used].all():
            rows = whole.new_zeros((self._plan.distinct, self._key.dim))
        else:
            rows = self._backward(self._with_bags(call), whole, self._plan.distinct)
        for table in np.flatnonzero(apart & is_used).tolist():
            self._backward_of_table(call, table, gradients[table], rows)
        return rows

    def _with_bags(self, call: _Call) -> _Call:
        """The same call with the bag of each id, if that is known and torch would compute it."""
        bag_of = self._plan.bag_of
        if bag_of is None or len(call.offset2bag) or call.places.device != _CPU:
            return call
        return call._replace(offset2bag=bag_of)

    def _backward_of_table(
        self, call: _Call, table: int, gradient: Tensor | None, rows: Tensor
    ) -> None:
        """One table by itself, with places in the order of its ids."""
        assert gradient is not None
        order = self._plan.found.places(table)
        rank = np.empty(self._plan.distinct, np.int64)
        rank[order] = np.arange(len(order))
        call = self._call_of_table(call, table, rank)
        rows[torch.from_numpy(order)] = self._backward(call, gradient.contiguous(), len(order))

    def _call_of_table(self, call: _Call, table: int, rank: Ints) -> _Call:
        before = self._inputs[:table]
        first = sum(each.count for each in before)
        ids = slice(first, first + self._inputs[table].count)
        first_bag = sum(each.bags for each in before)
        bags = slice(first_bag, first_bag + self._inputs[table].bags)
        return _Call(
            torch.from_numpy(rank[self._plan.found.inverse[ids]]).to(call.places.device),
            call.offsets[bags] - first,
            None if call.weights is None else call.weights[ids],
            int(rank[call.padding]) if 0 <= call.padding < len(rank) else call.padding,
            call.offset2bag[ids] - first_bag if len(call.offset2bag) else call.offset2bag,
            call.bag_size[bags],
            call.max_indices,
        )

    def _backward_of_embedding(self, gradient: Tensor | None) -> Tensor:
        assert gradient is not None
        places = self._plan.places.to(gradient.device)
        found: Tensor = embedding_backward(
            *(gradient, places.view(self._inputs[0].shape), self._plan.distinct),
            *(self._padding(), self._key.scale_grad_by_freq, self._key.sparse),
        )
        return found.coalesce().to_dense() if self._key.sparse else found

    def _apart(self) -> Flags:
        """Which tables need a backward of their own; see the note above."""
        key, plan = self._key, self._plan
        if key.mode == "max" or self.part.group.layout.is_ordered:
            return np.zeros(plan.tables, np.bool_)
        # Torch divides by the frequency of an id that stands elsewhere in the sorted list, as soon
        # as any id before comes twice.
        if key.sparse or (key.scale_grad_by_freq and 1 in plan.repeats):
            return np.ones(plan.tables, np.bool_)
        return plan.has_pairs if key.is_scaled else plan.has_triples

    def _padding(self) -> int:
        """Where the padding row is in the matrix, or -1; only a table that is alone has one.

        A batch without it gets a place behind the last row: torch takes another way through its
        kernel, and to other bits, when there is a padding at all.
        """
        group = self.part.group
        padding = group.attached[0].padding
        if padding is None:
            return -1
        place = self._plan.found.place(padding, 0, group.layout.owner_of(0, padding))
        return self._plan.distinct if place is None else place

    def _joined(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """The gradient of all bags, zeros for tables without one."""
        if len(gradients) == 1 and gradients[0] is not None:
            return gradients[0].contiguous()
        like = next(gradient for gradient in gradients if gradient is not None)
        return torch.cat(
            [
                like.new_zeros((each.bags, self._key.dim)) if gradient is None else gradient
                for gradient, each in zip(gradients, self._inputs, strict=True)
            ]
        )


def _weights(inputs: Sequence[FlatBags]) -> Tensor | None:
    weights = [each.weights for each in inputs if each.weights is not None]
    if not weights:
        return None
    return weights[0] if len(weights) == 1 else torch.cat(weights)


def _scaled(gradient: Tensor, scale: float) -> Tensor:
    return gradient if scale == 1.0 else gradient * scale


def _cut(pooled: Tensor, bags: list[int]) -> Sequence[Tensor]:
    """The bags of each table. Not views for autograd: users may change one in place."""
    return [pooled] if len(bags) == 1 else pooled.unsafe_split_with_sizes(bags)
