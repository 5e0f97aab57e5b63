"""Spread run delays over the steps that they are from.

To read them takes a system call for each thread, so a recorder does it now and then: most records
have zero, and one has what came together since the last. Called by steps.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from paceline.observe.records import StepRecord


def spread_run_delays(records: Sequence[StepRecord], threads: int) -> list[StepRecord]:
    """Divide each count among the steps since the one before, by their length.

    A count cannot be more than all threads waiting all the time. The first one may be: it has
    what came together before training began.
    """
    found: list[StepRecord] = []
    window: list[StepRecord] = []
    for record in records:
        window.append(record)
        if record.run_delay_ns:
            found += _divided(window, record.run_delay_ns, threads)
            window = []
    return found + window


def _divided(window: Sequence[StepRecord], delay_ns: int, threads: int) -> list[StepRecord]:
    took = [max(1, record.duration_ns) for record in window]
    total = sum(took)
    delay_ns = min(delay_ns, total * max(1, threads))
    return [
        dataclasses.replace(record, run_delay_ns=delay_ns * part // total)
        for record, part in zip(window, took, strict=True)
    ]
