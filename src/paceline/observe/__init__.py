"""What can be seen of a running wrapper.

:func:`on_step` hands every step to a function of yours; :mod:`paceline.observe.metrics` has ready
ones. With ``PACELINE_RUN_DIR`` set, as ``paceline run`` does, every rank also records its steps
into a file (docs/observe.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.observe.records import BucketTimes, StepRecord
from paceline.observe.stats import BucketStats, DDPStats
from paceline.observe.step_clock import StepClock
from paceline.on_use import import_on_use

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
__getattr__ = import_on_use(
    __name__,
    {
        "Handle": "recording",
        "log": "logged",
        "metrics": "",
        "note": "recording",
        "on_step": "recording",
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
