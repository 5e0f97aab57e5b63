"""Training that goes on when ranks die, come back, join or leave (docs/elastic.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.on_use import import_on_use

if TYPE_CHECKING:
    from paceline.elastic.data.iterable import IterableCursor
    from paceline.elastic.data.sampler import DistributedSampler
    from paceline.elastic.events import MembershipEvent
    from paceline.elastic.session import run
    from paceline.elastic.state import State

__all__ = ["DistributedSampler", "IterableCursor", "MembershipEvent", "State", "run"]

# The launcher uses this package, too, and has no torch.
__getattr__ = import_on_use(
    __name__,
    {
        "DistributedSampler": "data.sampler",
        "IterableCursor": "data.iterable",
        "MembershipEvent": "events",
        "State": "state",
        "run": "session",
    },
)
