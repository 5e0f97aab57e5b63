"""The numbers of a step under the names that all metrics share.

Must not know where they go.
"""

from __future__ import annotations

import math

from paceline.observe.records import StepRecord


def phase_seconds(record: StepRecord) -> dict[str, float]:
    """How long a step was in each phase. What was not seen is 0."""
    return {
        "input": _seconds(record.began_ns, record.forward_began_ns),
        "forward": _seconds(record.forward_began_ns, record.forward_ended_ns),
        "backward": _seconds(record.backward_began_ns, record.backward_ended_ns),
        "waiting": record.waited_ns / 1e9,
        "optimizer": _seconds(record.optimizer_began_ns, record.optimizer_ended_ns),
    }


def step_values(record: StepRecord) -> dict[str, float]:
    """Return what is worth a curve; a loss that nobody gave is left out."""
    seconds = record.duration_ns / 1e9
    values = {f"{phase}_ms": 1e3 * each for phase, each in phase_seconds(record).items()}
    values |= {"step_ms": 1e3 * seconds, "cpu_ms": record.cpu_ns / 1e6}
    if record.samples and seconds > 0:
        values["samples_per_s"] = record.samples / seconds
    if not math.isnan(record.loss):
        values["loss"] = record.loss
    return values | dict(record.numbers)


def _seconds(began_ns: int, ended_ns: int) -> float:
    return max(0, ended_ns - began_ns) / 1e9 if began_ns and ended_ns else 0.0
