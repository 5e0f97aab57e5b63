"""A stand-in for a process group that sends nothing and counts what would be sent.

Known to :mod:`paceline.hooks.interface`, whose collectives it takes the place of; used by dry runs.
"""

from __future__ import annotations

from typing import Any

import torch


class CountingGroup:
    """A group of a given number of ranks, of which this is the first.

    Attributes:
        sent_bytes: What this rank would have sent so far.
    """

    def __init__(self, world: int) -> None:
        self._world = world
        self.sent_bytes = 0

    def size(self) -> int:
        """How many ranks."""
        return self._world

    def rank(self) -> int:
        """Which one."""
        return 0

    def count(self, tensor: torch.Tensor, passes: float) -> torch.futures.Future[Any]:
        """Count ``passes`` times a tensor, and return a future that is done."""
        self.sent_bytes += int(tensor.numel() * tensor.element_size() * passes)
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([tensor])
        return future
