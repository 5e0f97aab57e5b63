"""Comparisons as a table, in words, and as JSON together with where they were measured."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paceline.cli.bench.harness.comparison import Comparison
from paceline.cli.bench.harness.estimates import Estimate

PIPE_COLUMNS = 140
Column = Callable[[Comparison, str], str]
"""Makes the cell of one contender."""


def console() -> Console:
    """Where tables are printed: a terminal as it is, a file or a pipe wide enough for numbers."""
    found = Console()
    return found if found.is_terminal else Console(width=max(found.width, PIPE_COLUMNS))


def table(
    title: str,
    comparisons: Sequence[Comparison],
    baseline: str,
    more: Mapping[str, Column] | None = None,
) -> Table:
    """Lay out comparisons below each other; the winner of each is marked with a star."""
    made = Table(title=escape(f"{title}; median [95 % interval]; ★ fastest, ties included"))
    made.add_column("what", overflow="fold")
    made.add_column("contender", no_wrap=True)
    for heading in ("ms", f"x as fast as {baseline}", *(more or {})):
        made.add_column(heading, justify="right", no_wrap=heading == "ms")
    for comparison in comparisons:
        winners = comparison.winners
        for number, name in enumerate(comparison.times_ms):
            is_baseline = name == comparison.baseline
            made.add_row(
                escape(comparison.title) if number == 0 else "",
                f"[bold green]{escape(name)} ★[/]" if name in winners else escape(name),
                _time(comparison.time_ms(name)),
                "1" if is_baseline else escape(str(comparison.speed(name))),
                *(cell(comparison, name) for cell in (more or {}).values()),
            )
        made.add_section()
    return made


def _time(found: Estimate) -> str:
    digits = 3 if found.value < 1 else 2 if found.value < 10 else 1
    low, high = f"{found.low:.{digits}f}", f"{found.high:.{digits}f}"
    return escape(f"{found.value:.{digits}f} [{low}, {high}]")


def machine_facts() -> dict[str, Any]:
    """Return versions and what the machine has."""
    try:
        version = importlib.metadata.version("paceline")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        version = "not installed"
    return {
        "paceline": version,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "load": [round(value, 1) for value in os.getloadavg()],
    }


def write_json(path: Path | None, results: Mapping[str, Any]) -> None:
    """Write results together with where they were measured; nothing if no file is wanted."""
    if path is not None:
        document = {"machine": machine_facts(), **results}
        path.write_text(json.dumps(document, indent=2) + "\n")
