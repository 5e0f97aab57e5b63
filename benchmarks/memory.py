"""Peak memory above the weights, in gradient sets: a plain module needs one, torch's default two.

``python -m benchmarks memory --help``. Every contender runs in fresh processes, because memory that
one has freed would hide what the next one takes. What the ranks do is in :mod:`benchmarks.rss`.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from rich.table import Table

from benchmarks.rss import GRADIENT_BYTES, Peaks, measure_peaks
from paceline.cli.bench.harness import report
from paceline.cli.bench.harness.contenders import PACELINE, WRAPPERS, Contender, parse_contender
from paceline.cli.bench.harness.options import add_outputs, describe, positive
from paceline.cli.bench.harness.progress import RoundBar
from paceline.testing import run_ranks

MIB = 1024 * 1024
LIMIT = 1.5
"""Gradient sets that Paceline may take at its peak: one, and room for what is in transit."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    describe(parser, "python -m benchmarks memory --ranks 2 --check")
    add_outputs(parser, plot=False)
    parser.add_argument("--ranks", type=positive, default=2, help="default: 2")
    parser.add_argument(
        "--keep-gradients",
        action="store_true",
        help="zero_grad(set_to_none=False): gradients stay allocated between steps",
    )
    parser.add_argument(
        "--also",
        type=parse_contender,
        action="append",
        default=[],
        metavar="LABEL=MODULE:CLASS",
        help="a further wrapper; may be repeated",
    )
    parser.add_argument(
        "--check", action="store_true", help=f"exit with 1 if paceline's peak is above {LIMIT} sets"
    )


def run(args: argparse.Namespace) -> int:
    """Measure and show."""
    contenders = (*WRAPPERS, *args.also)
    results = {}
    with RoundBar("contenders", len(contenders)) as bar:
        for each in contenders:
            results[each.label] = _measure(args, each)
            bar.advance(each.label)
    report.console().print(_table(results))
    measured = {label: asdict(peaks) for label, peaks in results.items()}
    report.write_json(args.json, {"gradient_bytes": GRADIENT_BYTES, "results": measured})
    is_missed = _sets(results[PACELINE].highest) > LIMIT
    return 1 if args.check and is_missed else 0


def _measure(args: argparse.Namespace, contender: Contender) -> Peaks:
    per_rank = run_ranks(
        args.ranks, measure_peaks, contender, not args.keep_gradients, timeout_s=args.timeout
    )
    return max(per_rank, key=lambda peaks: peaks.highest)


def _sets(nbytes: int) -> float:
    return nbytes / GRADIENT_BYTES


def _table(results: dict[str, Peaks]) -> Table:
    size = f"{GRADIENT_BYTES / MIB:.0f} MiB"
    table = Table(title=f"memory above the weights; 1 set = all gradients = {size}; the worst rank")
    table.add_column("contender")
    headings = ("constructed", "peak, step 1", "step 2", "steps 3 to 5", "held after a step")
    for heading in headings:
        table.add_column(heading, justify="right")
    for label, peaks in results.items():
        values = (peaks.constructed, peaks.first, peaks.second, peaks.later, peaks.held)
        table.add_row(label, *(f"{_sets(value):.2f} sets" for value in values))
    return table
