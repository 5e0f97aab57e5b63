"""Batches that were announced before they are used. Called by ``ps/client/table_set.py``.

[Note: order and staleness]
``staleness`` is the number k of its *own* pushes that the rows of a batch may lack. A module counts
its pushes, and its *open graphs*: forwards whose backward has not pushed yet and still can.

- An announced batch is asked for as soon as at most k graphs are open: each of them is a push that
  its rows will lack. With k = 0 that is right behind the last push, on the same connection, so the
  server sees push and lookup in the order of a trainer that does not prefetch.
- When the batch is used, its rows are taken only if at most k pushes were made since it was asked
  for. If there were more, or rows were written or loaded since, it is asked for again. So the bound
  holds whatever the order of calls is; only time is lost.
- At most k + 1 announced batches are kept; a further one drops the oldest.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from paceline.ps.client.batch_exchange import BatchExchange, Stage

log = logging.getLogger("paceline.ps")


@dataclass
class PrefetchCounts:
    """How announced batches fared.

    Args:
        used: Forwards that used an announced batch.
        late: Of these, those that had to ask (again) when they were called.
        dropped: Announced and never used, because newer ones came.
    """

    used: int = 0
    late: int = 0
    dropped: int = 0


@dataclass
class _Announced:
    batch: Any
    tensors: list[tuple[Tensor, int]]
    """With their versions when they were announced."""
    exchange: BatchExchange
    epoch: int


@dataclass
class Announcements:
    """The announced batches of a module.

    Args:
        staleness: See the note.
    """

    staleness: int
    counts: PrefetchCounts = field(default_factory=PrefetchCounts)
    _waiting: list[_Announced] = field(default_factory=list)

    def add(self, batch: Any, exchange: BatchExchange, epoch: int) -> None:
        """Keep a batch until it is used."""
        tensors = [(each, each._version) for each in _tensors(batch)]
        self._waiting.append(_Announced(batch, tensors, exchange, epoch))
        if len(self._waiting) > self.staleness + 1:
            dropped = self._waiting.pop(0)
            dropped.exchange.forget()
            if not self.counts.dropped:
                log.warning(
                    "a prefetched batch was not used before %d newer ones came; its rows were "
                    "asked for in vain (said once)",
                    self.staleness + 1,
                )
            self.counts.dropped += 1

    def ask(self, pushes: int, open_graphs: int) -> None:
        """Ask for what may be asked for now."""
        if open_graphs <= self.staleness:
            for each in self._waiting:
                if each.exchange.stage is Stage.PLANNED:
                    each.exchange.ask(pushes)

    def take(self, batch: Any, pushes: int, epoch: int) -> BatchExchange | None:
        """The exchange of a batch that is used now, if it was announced."""
        for at, each in enumerate(self._waiting):
            if _is_unchanged(each) and _is_same(batch, each.batch):
                del self._waiting[at]
                self._use(each, pushes, epoch)
                return each.exchange
        return None

    def _use(self, each: _Announced, pushes: int, epoch: int) -> None:
        exchange = each.exchange
        is_asked = exchange.stage is Stage.ASKED
        is_old = pushes - exchange.pushes_before > self.staleness or epoch != each.epoch
        if is_asked and is_old:
            exchange.forget()
        self.counts.used += 1
        self.counts.late += not is_asked or is_old


def _tensors(batch: Any) -> list[Tensor]:
    """The tensors of a batch; those of tables that share their bags once."""
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, (tuple, list)):
        return [each for each in batch if each is not None]
    found: list[Tensor] = []
    last = None
    for bags in batch.values():
        if bags is not last:
            found.extend(_tensors(bags))
            last = bags
    return found


def _is_unchanged(announced: _Announced) -> bool:
    return all(tensor._version == version for tensor, version in announced.tensors)


def _is_same(batch: Any, announced: Any) -> bool:
    """Say whether a batch is the announced one: its tensors, or equal ones."""
    if isinstance(batch, (Tensor, tuple)):
        return _are_equal(batch, announced)
    if len(batch) != len(announced):
        return False
    ours = theirs = None
    for name, bags in batch.items():
        other = announced.get(name)
        if bags is not ours or other is not theirs:
            if not _are_equal(bags, other):
                return False
            ours, theirs = bags, other
    return True


def _are_equal(one: Any, other: Any) -> bool:
    """Say whether two tables' inputs are the same: a tensor, or Bags."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if not isinstance(one, Tensor):
        return one is not None and len(one) == len(other) and all(map(_are_equal, one, other))
    return one.shape == other.shape and one.dtype == other.dtype and one.equal(other)
