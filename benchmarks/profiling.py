"""Where a step's Python time goes: cProfile over many steps, per function and per gradient.

cProfile sees the hooks because on CPU the backward runs in the calling thread. It makes every call
dearer, so its numbers rank functions; they do not add up to what a step takes without it.
"""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from rich.table import Table

from paceline.cli.bench.harness import workloads
from paceline.cli.bench.harness.contenders import Contender
from paceline.cli.bench.harness.interleave import time_step

WORKLOAD = "small"
PARAMETERS = 600
WARM_UP_STEPS = 5
STEPS = 50
SHOWN = 30


@dataclass(frozen=True)
class Line:
    """One function: calls a step; microseconds per parameter in itself and in all it calls."""

    function: str
    calls: float
    own_us: float
    total_us: float


def profile_steps(contender: Contender) -> list[Line]:
    """Profile a contender; called on a rank. Returns the dearest functions first."""
    workload = workloads.make(WORKLOAD)
    model = contender.wrap(workload.module)
    batch = workloads.batch(workload, seed=0)
    for _ in range(WARM_UP_STEPS):
        time_step(model, batch)
    profile = cProfile.Profile()
    with profile:
        for _ in range(STEPS):
            time_step(model, batch)
    return sorted(_lines(profile), key=lambda line: -line.own_us)[:SHOWN]


def _lines(profile: cProfile.Profile) -> list[Line]:
    scale = 1e6 / STEPS / PARAMETERS
    # The field has no declared type in typeshed.
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    return [
        Line(_name(*place), calls / STEPS, own_s * scale, total_s * scale)
        for place, (_, calls, own_s, total_s, _) in stats.items()
    ]


def _name(path: str, line: int, function: str) -> str:
    if not line:  # a builtin
        return function
    return f"{'/'.join(PurePath(path).parts[-2:])}:{line} {function}"


def table(lines: Sequence[Line], label: str) -> Table:
    """Show a profile."""
    made = Table(title=f"{label}: cProfile of {STEPS} steps, one rank, per parameter")
    made.add_column("function", overflow="fold")
    for heading in ("calls a step", "own us", "total us"):
        made.add_column(heading, justify="right")
    for line in lines:
        made.add_row(
            line.function, f"{line.calls:.0f}", f"{line.own_us:.3f}", f"{line.total_us:.3f}"
        )
    return made
