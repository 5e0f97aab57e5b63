"""The two messages of a normalisation over ranks, and a way to repeat them with nothing to say.

Used by :mod:`paceline.nn.batch_stats`; recorded and repeated by :mod:`paceline.nn.join_mirror`.
Must not know what the numbers mean, only that zeros do not count.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from paceline.liveness import gather_all, watch_of
from paceline.liveness.store import gather_by_store
from paceline.torch_private.groups import group_store, group_timeout


@dataclass(frozen=True)
class ExchangeTerms:
    """What a rank needs to know to take part in a collective."""

    is_gather: bool
    numel: int
    dtype: torch.dtype
    device: torch.device


class Exchange:
    """Talks to the ranks of one group."""

    always_sums = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._watch = watch_of(group)

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks, in rank order."""
        what = "gathering of batch statistics"
        rows = torch.stack(gather_all(self.group, row.contiguous(), what))
        if not self._watch.roster.is_complete:
            self._meet()
        return rows

    def _meet(self) -> None:
        """Learn who the ranks are. By the store: a step has its two collectives, the first too."""
        store, what = group_store(self.group), "the first batch of SyncBatchNorm"
        timeout = group_timeout(self.group) or dist.default_pg_timeout
        prefixed = dist.PrefixStore("paceline/norm", store)  # type: ignore[attr-defined]
        rank, world = self.group.rank(), self.group.size()
        self._watch.meet(gather_by_store(prefixed, rank, world, self._watch, timeout, what))

    def sum(self, values: torch.Tensor) -> None:
        """Replace the values by their sum over all ranks."""
        what = "sum of a normalisation's gradients"
        self._watch.run(what, lambda: self.group.allreduce([values]))

    def repeat(self, message: ExchangeTerms) -> None:
        """Take part in a message with zeros; not recorded."""
        zeros = torch.zeros(message.numel, dtype=message.dtype, device=message.device)
        if message.is_gather:
            Exchange.gather(self, zeros)
        else:
            Exchange.sum(self, zeros)


class RecordedExchange(Exchange):
    """Notes the messages of the latest step."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.messages: list[ExchangeTerms] = []

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """As in the base class."""
        self.messages.append(ExchangeTerms(True, row.numel(), row.dtype, row.device))
        return super().gather(row)

    def sum(self, values: torch.Tensor) -> None:
        """As in the base class."""
        self.messages.append(ExchangeTerms(False, values.numel(), values.dtype, values.device))
        super().sum(values)
