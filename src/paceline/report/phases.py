"""The phases of a step, as the report names them. Imported by all of ``report``; knows nothing."""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """Where a rank's own time goes between two reductions, in the order of a step."""

    REDUCTION = "reduction"
    """It came out of the reduction later than others did."""

    OPTIMIZER = "optimizer"
    """From the reduction to the end of ``optimizer.step()``: clipping and logging included."""

    INPUT = "input"
    """Until the forward begins: the data loader, and what the script does between steps."""

    FORWARD = "forward"
    """The wrapper's forward; with accumulation, all micro-batches but the last backward."""

    LOSS = "loss"
    """Between the forward and the backward."""

    BACKWARD = "backward"
    """Until its last gradient was there."""


PHASES = tuple(Phase)

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000


def to_ms(ns: float) -> float:
    """Milliseconds, to the microsecond."""
    return round(ns / NS_PER_MS, 3)
