"""This rank's account of itself, made by its own watchdog when somebody asks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from paceline.errors import RecordsError
from paceline.observe.records import Activity
from paceline.observe.ring import read_status
from paceline.observe.run_folder import RunFolder
from paceline.observe.stall.account import Account
from paceline.observe.stall.probes import Probe, probes
from paceline.observe.stall.threads import look_at_threads

_MAX_COLLECTIVES = 64


def describe_self(folder: RunFolder, rank: int, token: str, usual_wait_s: float = 0.0) -> Account:
    """Look at this process and say what it does.

    Args:
        folder: Of the run.
        rank: This one.
        token: Of the question that is answered.
        usual_wait_s: How long it waits for others in a usual step.
    """
    from paceline.observe.recording import active_recorder  # it starts recorders, which start us

    found, recorder = probes(), active_recorder()
    try:
        activity = read_status(folder.events(rank)).activity
    except (OSError, RecordsError):
        activity = Activity.STARTING
    seen = look_at_threads(activity, found)
    is_evaluating = False
    if recorder is not None and activity is Activity.FORWARD:
        is_evaluating = recorder.is_evaluating
    if is_evaluating:
        seen = replace(seen, where=f"{seen.where} (an evaluation)")
    return Account(
        rank=rank,
        token=token,
        at_ns=time.perf_counter_ns(),
        awaited="; ".join(filter(None, (probe.awaited() for probe in found))),
        collectives=tuple(_collectives(found)),
        is_evaluating=is_evaluating,
        usual_wait_s=usual_wait_s,
        **vars(seen),
    )


def _collectives(found: Sequence[Probe]) -> list[str]:
    """Those of the process, then the buckets of each wrapper."""
    told = [each for probe in found[:1] for each in probe.collectives()]
    told += [each for probe in found for each in probe.reductions()]
    return told[:_MAX_COLLECTIVES]
