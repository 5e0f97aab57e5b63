"""The two messages of a normalisation over ranks, and a way to repeat them with nothing to say.

Used by :mod:`paceline.nn.batch_stats`; recorded and repeated by :mod:`paceline.nn.join_mirror`.
Must not know what the numbers mean, only that zeros do not count.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Message:
    """What a rank needs to know to take part in a collective."""

    is_gather: bool
    numel: int
    dtype: torch.dtype
    device: torch.device


class Exchange:
    """Talks to the ranks of one group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks, in rank order."""
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(rows, row, group=self.group)
        return torch.stack(rows)

    def sum(self, values: torch.Tensor) -> None:
        """Replace the values by their sum over all ranks."""
        dist.all_reduce(values, group=self.group)

    def repeat(self, message: Message) -> None:
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
        self.messages: list[Message] = []

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """As in the base class."""
        self.messages.append(Message(True, row.numel(), row.dtype, row.device))
        return super().gather(row)

    def sum(self, values: torch.Tensor) -> None:
        """As in the base class."""
        self.messages.append(Message(False, values.numel(), values.dtype, values.device))
        super().sum(values)
