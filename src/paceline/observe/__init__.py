"""What can be seen of a running wrapper.

:func:`on_step` hands every step to a function of yours; :mod:`paceline.observe.metrics` has ready
ones. With ``PACELINE_RUN_DIR`` set, as ``paceline run`` does, every rank also records its steps
into a file (docs/observe.md).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from paceline.observe.records import BucketTimes, StepRecord
from paceline.observe.stats import BucketStats, DDPStats
from paceline.observe.step_clock import StepClock

if TYPE_CHECKING:
    from paceline.observe import metrics
    from paceline.observe.logged import log
    from paceline.observe.recording import Handle, note, on_step

__all__ = [
    "BucketStats",
    "BucketTimes",
    "DDPStats",
    "Handle",
    "StepClock",
    "StepRecord",
    "log",
    "metrics",
    "note",
    "on_step",
]

# `import paceline` comes by here, and needs none of these.
_IMPORTED_ON_USE = {
    "Handle": "recording",
    "log": "logged",
    "note": "recording",
    "on_step": "recording",
}


def __getattr__(name: str) -> object:
    value: object
    if name == "metrics":
        value = importlib.import_module("paceline.observe.metrics")
    elif name in _IMPORTED_ON_USE:
        value = getattr(importlib.import_module(f"{__name__}.{_IMPORTED_ON_USE[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
