"""Training that goes on when ranks die, come back, join or leave (docs/elastic.md)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.elastic.data.iterable import IterableCursor
    from paceline.elastic.data.sampler import DistributedSampler
    from paceline.elastic.events import MembershipEvent
    from paceline.elastic.session import run
    from paceline.elastic.state import State

__all__ = ["DistributedSampler", "IterableCursor", "MembershipEvent", "State", "run"]

# The launcher uses this package, too, and has no torch. No name may be that of a submodule.
_IMPORTED_ON_USE = {
    "DistributedSampler": "data.sampler",
    "IterableCursor": "data.iterable",
    "MembershipEvent": "events",
    "State": "state",
    "run": "session",
}


def __getattr__(name: str) -> object:
    if name not in _IMPORTED_ON_USE:
        raise AttributeError(f"module 'paceline.elastic' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"paceline.elastic.{_IMPORTED_ON_USE[name]}"), name)
    globals()[name] = value
    return value
