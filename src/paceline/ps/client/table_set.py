"""The tables of one module on its servers: attach, look up, push, prefetch, read, write.

Called by the modules (``ps/modules/base.py``, ``ps/modules/collection.py``), which know how
they are called; this file knows what happens then. One autograd function stands for all tables of a
batch: its outputs are what servers sent, its backward makes one push for each server.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paceline.errors import BagsError, ConfigurationError
from paceline.forks import tell_children
from paceline.ps.client.batch import FlatBags
from paceline.ps.client.batch_exchange import BatchExchange, Stage
from paceline.ps.client.connection import Servers
from paceline.ps.client.message_parts import BagsPart, Part, RowsPart
from paceline.ps.client.message_plan import RowsPlan, planned
from paceline.ps.client.placement import attach
from paceline.ps.client.prefetch import Announcements
from paceline.ps.client.refused_pushes import check_refused
from paceline.ps.client.table_config import TableConfig
from paceline.ps.client.table_group import Group, GroupKey, group_key_of
from paceline.ps.protocol.wire import SECTIONS

Batch = Mapping[int, FlatBags]
"""For each table that is asked, by its index, its input."""


class TableSet:
    """Tables of one module.

    Args:
        servers: Where.
        configs: Which.
        staleness: See ``ps/client/prefetch.py``.
        grad_scale: Gradients are multiplied by this before they are pushed.

    Attributes:
        lrs: The learning rate of each, sent with every push.
        pushes: How many pushes were made.
        is_trained: False: lookups make no graph, so nothing is pushed.
    """

    def __init__(
        self, servers: Servers, configs: Sequence[TableConfig], staleness: int, grad_scale: float
    ) -> None:
        if not 0 < len(configs) <= SECTIONS:
            raise ConfigurationError(f"1 to {SECTIONS} tables, not {len(configs)}")
        if staleness < 0:
            raise ConfigurationError(f"staleness is a number of pushes, not {staleness}")
        self.servers = servers
        self.attached = attach(servers, configs)
        self.lrs = [config.optimizer.lr for config in configs]
        self.pushes = 0
        self.is_trained = True
        self.announced = Announcements(staleness)
        self._grad_scale = grad_scale
        self._groups: dict[Any, list[Group]] = {}
        self._may_pool = [
            config.pooling != "trainer" and config.may_pool(len(servers)) for config in configs
        ]
        self._is_forced = any(config.pooling == "server" for config in configs)
        self._open: weakref.WeakSet[BatchExchange] = weakref.WeakSet()
        self._lock = threading.RLock()
        # Autograd calls a backward only for what hangs on something that requires a gradient.
        # No parameter: neither DDP nor an optimizer sees it.
        self._anchor = torch.empty(0, requires_grad=True)
        tell_children(self)

    def let_go(self) -> None:
        """In a forked child: the lock may be held by a thread that is not here."""
        self._lock = threading.RLock()

    def prefetch(self, batch: Any, inputs: Batch) -> None:
        """Announce a batch; it is asked for as soon as its order allows."""
        with self._lock:
            check_refused(self.servers.channels, "prefetch")
            self.announced.add(batch, self.plan(inputs), self.servers.epoch)
            self._ask_announced()

    def forward(self, batch: Any, read: Callable[[], Batch]) -> dict[int, Tensor]:
        """Look up a batch, and pool it. ``read`` gives its inputs, if it was not announced."""
        exchange = self._exchange(batch, read)
        found = _Lookup.apply(self._root, exchange, self, None, *exchange.weights())  # type: ignore[no-untyped-call]
        return dict(zip(exchange.tables, found, strict=True))

    def joined(self, batch: Any, order: list[int], read: Callable[[], Batch]) -> Tensor:
        """The same as one matrix: the bags of all tables side by side, in this order.

        One output instead of many: autograd has less to do, and no concatenation to go back
        through.
        """
        exchange = self._exchange(batch, read)
        (found,) = _Lookup.apply(self._root, exchange, self, order, *exchange.weights())  # type: ignore[no-untyped-call]
        return found  # type: ignore[no-any-return]

    @property
    def _root(self) -> Tensor:
        return self._anchor if self.is_trained else self._anchor.detach()

    def _exchange(self, batch: Any, read: Callable[[], Batch]) -> BatchExchange:
        """The batch on its way: asked for, now or before."""
        with self._lock:
            check_refused(self.servers.channels, "lookup")
            exchange = self.announced.take(batch, self.pushes, self.servers.epoch)
            if exchange is None:
                exchange = self.plan(read())
            if exchange.stage is Stage.PLANNED:
                exchange.ask(self.pushes)
        return exchange

    def push(self, exchange: BatchExchange, gradients: Sequence[Tensor | None]) -> None:
        """Push what a backward found, then ask for what waited for it.

        Raises:
            PushRefusedError: An earlier push was refused; this one was not sent.
        """
        with self._lock:
            self._open.discard(exchange)
            check_refused(self.servers.channels, "push, which was not sent")
            self._hold(True)
            try:
                if exchange.push(gradients, self.lrs, self._grad_scale):
                    self.pushes += 1
                self._ask_announced()
            finally:
                self._hold(False)

    def _hold(self, is_held: bool) -> None:
        """Let servers find push and lookup together."""
        for channel in self.servers.channels:
            channel.hold(is_held)

    def opened(self, exchange: BatchExchange) -> None:
        """A graph was made that may push."""
        self._open.add(exchange)

    def _ask_announced(self) -> None:
        self.announced.ask(self.pushes, len(self._open))

    def plan(self, inputs: Batch) -> BatchExchange:
        """Which rows a batch needs from which server."""
        parts: list[Part] = []
        for group in self.groups_of(inputs):
            parts.extend(self._parts(group, inputs))
        return BatchExchange(parts, self.servers.channels)

    def _parts(self, group: Group, inputs: Batch) -> Iterator[Part]:
        """Decide for each table who pools; what trainers pool is planned together."""
        mine = [inputs[table] for table in group.tables]
        plan = planned(group, mine, self.lrs)
        pooled = self._pooled_by_servers(group, mine, plan)
        for at in pooled:
            yield BagsPart(group.tables[at], group.attached[at], mine[at])
        if not pooled:
            yield RowsPart(group, plan, mine)
        elif rest := {t: inputs[t] for at, t in enumerate(group.tables) if at not in pooled}:
            for smaller in self.groups_of(rest):
                left = [rest[table] for table in smaller.tables]
                yield RowsPart(smaller, planned(smaller, left, self.lrs), left)

    def _pooled_by_servers(self, group: Group, mine: list[FlatBags], plan: RowsPlan) -> list[int]:
        """Which tables of a group, by where they are in it."""
        if not self._is_forced:
            most = max([each.count for each in mine])
            if most * (8 + group.row_bytes) <= WORTH_BYTES:
                return []  # no table can spare that much
        return [
            at
            for at, each in enumerate(mine)
            if self._may_pool[group.tables[at]]
            and self._is_pooled_by_server(group, at, each, plan.found.starts)
        ]

    def _is_pooled_by_server(self, group: Group, at: int, bags: FlatBags, starts: Any) -> bool:
        table = group.attached[at]
        if bags.offsets is None or (bags.weights is not None and bags.weights.requires_grad):
            return False
        if table.config.pooling == "server":
            return True
        first = table.first_server * len(group.tables) + at
        return _is_smaller(bags, int(starts[first + 1] - starts[first]), group.row_bytes)

    def groups_of(self, inputs: Batch) -> list[Group]:
        """The tables of a batch, by key."""
        shape = (tuple(inputs), *[bags.form for bags in inputs.values()])
        groups = self._groups.get(shape)
        if groups is None:
            by_key: dict[GroupKey, list[int]] = {}
            for table, bags in inputs.items():
                key = group_key_of(table, self.attached[table].config, *bags.form)
                by_key.setdefault(key, []).append(table)
            groups = [
                Group(tables, [self.attached[table] for table in tables], key)
                for key, tables in by_key.items()
            ]
            if len(self._groups) >= _KEPT_GROUPS:
                self._groups.clear()
            self._groups[shape] = groups
        return groups


_KEPT_GROUPS = 256


WORTH_BYTES = 64 << 10
"""To pool a table costs a server half a millisecond; it must spare a batch so many bytes a way."""


def _is_smaller(bags: FlatBags, rows: int, row_bytes: int) -> bool:
    """Say whether pooled bags spare enough bytes; both ways are the same size."""
    weights = 0 if bags.weights is None else bags.count * bags.weights.itemsize
    as_bags = 8 * (bags.count + bags.bags) + weights + bags.bags * row_bytes
    return as_bags + WORTH_BYTES < rows * (8 + row_bytes)


class _Lookup(torch.autograd.Function):
    """What servers sent, pooled; in backward, what is sent to them.

    With an order, there is one output: the bags of all tables side by side.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        exchange: BatchExchange,
        tables: TableSet,
        order: list[int] | None,
        *weights: Tensor | None,
    ) -> Any:
        ctx.exchange, ctx.tables, ctx.order = exchange, tables, order
        ctx.set_materialize_grads(False)
        if ctx.needs_input_grad[0]:
            tables.opened(exchange)
        found = exchange.collect()
        if order is None:
            return found
        outputs = dict(zip(exchange.tables, found, strict=True))
        pieces = [outputs[table] for table in order]
        if len({len(piece) for piece in pieces}) > 1:
            counts = {tables.attached[at].config.name: len(outputs[at]) for at in order}
            raise BagsError(f"side by side, all tables have as many bags, not {counts}")
        ctx.widths = [piece.shape[1] for piece in pieces]
        return (torch.cat(pieces, 1),)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        exchange: BatchExchange = ctx.exchange
        if ctx.order is not None and gradients[0] is not None:
            pieces = dict(zip(ctx.order, gradients[0].split(ctx.widths, 1), strict=True))
            gradients = tuple([pieces[table] for table in exchange.tables])
        needed = ctx.needs_input_grad
        weights = exchange.weights_backward(gradients) if any(needed[_WEIGHTS_AT:]) else ()
        if needed[0]:
            ctx.tables.push(exchange, gradients)
        rest = weights or [None] * (len(needed) - _WEIGHTS_AT)
        return *([None] * _WEIGHTS_AT), *rest


_WEIGHTS_AT = 4  # of the arguments of a lookup
