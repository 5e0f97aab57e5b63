"""Spread what was counted over the steps that it is from: CPU time, faults, run delays, steal.

To read them takes system calls, so a recorder does it now and then: most records of short steps
have zero, and one has what came together since the last. Called by steps.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from paceline.observe.records import StepRecord


def spread_counts(records: Sequence[StepRecord], threads: int) -> list[StepRecord]:
    """Divide each count among the steps since the one before, by their length.

    A count of 0 was not asked for; a run delay of 1 ns is none, and so is a steal (records.py).
    A run delay cannot be more than all threads waiting all the time. The first one may be: it has
    what came together before training began.
    """
    has_delay = [record.run_delay_ns != 0 for record in records]
    has_counts = [record.cpu_ns != 0 for record in records]
    delays_ns = _spread(records, [record.run_delay_ns for record in records], has_delay)
    cpu_ns = _spread(records, [record.cpu_ns for record in records], has_counts)
    was_asked = [record.stolen_ns != 0 for record in records]
    stolen_ns = _spread(records, [record.stolen_ns for record in records], was_asked)
    faults = _spread(records, [record.major_faults for record in records], has_counts)
    return [
        dataclasses.replace(
            record,
            run_delay_ns=min(delay, max(1, record.duration_ns) * max(1, threads)),
            cpu_ns=cpu,
            major_faults=pages,
            stolen_ns=min(stolen, max(1, record.duration_ns)),
        )
        for record, delay, cpu, pages, stolen in zip(
            records, delays_ns, cpu_ns, faults, stolen_ns, strict=True
        )
    ]


def _spread(
    records: Sequence[StepRecord], counts: Sequence[int], was_asked: Sequence[bool]
) -> list[int]:
    found: list[int] = []
    window: list[int] = []
    for record, count, is_last in zip(records, counts, was_asked, strict=True):
        window.append(max(1, record.duration_ns))
        if is_last:
            found += _divided(count, window)
            window = []
    return [*found, *counts[len(found) :]]


def _divided(count: int, parts: Sequence[int]) -> list[int]:
    """Whole numbers whose sum is the count."""
    total, before, found = sum(parts), 0, []
    for part in parts:
        found.append(count * (before + part) // total - count * before // total)
        before += part
    return found
