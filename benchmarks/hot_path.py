"""Microseconds per gradient: what a wrapper adds to 300 x Linear(32), over its 600 parameters.

``python -m benchmarks.hot_path --help``. On one rank nothing travels, so what is left is
bookkeeping; on two, communication comes on top. ``--profile`` shows where Paceline's part goes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks import command, profiling
from benchmarks.floor import HOOKS_ONLY
from benchmarks.interleave import (
    Cost,
    Samples,
    Schedule,
    Step,
    mean_over_ranks,
    run_rank,
    time_backward,
    time_forward,
)
from benchmarks.progress import RoundBar
from benchmarks.ratios import Estimate, bootstrap_interval
from benchmarks.variants import LOCAL, STANDARD, Variant, parse_variant
from paceline.testing import run_ranks

WORKLOAD = "small"
PARAMETERS = 600
PARTS: dict[str, Step] = {"forward": time_forward, "backward": time_backward}


@dataclass(frozen=True)
class Result:
    """What was measured on one number of ranks: costs by part, then as in Samples."""

    ranks: int
    parts: dict[str, Samples]

    def added_us(self, part: str, label: str, clock: str) -> Estimate:
        """Microseconds that a variant adds per parameter, by the median of rounds."""
        rounds = zip(self.parts[part][label], self.parts[part][LOCAL], strict=True)
        added = [
            (_median_ms(mine, clock) - _median_ms(plain, clock)) * 1e3 / PARAMETERS
            for mine, plain in rounds
        ]
        return Estimate(median(added), *bootstrap_interval(added))

    def to_json(self) -> dict[str, Any]:
        """All estimates."""
        return {
            "ranks": self.ranks,
            "parameters": PARAMETERS,
            "added_us_per_parameter": {
                label: {
                    f"{part}_{clock}": asdict(self.added_us(part, label, clock))
                    for part in self.parts
                    for clock in Cost._fields
                }
                for label in self.parts["backward"]
                if label != LOCAL
            },
        }


def _median_ms(block: Sequence[Cost], clock: str) -> float:
    return median(cost.cpu_ms if clock == "cpu_ms" else cost.wall_ms for cost in block)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, measure, print."""
    args = _parser().parse_args(argv)
    return command.guarded(lambda: _run(args))


def _parser() -> argparse.ArgumentParser:
    parser = command.parser(
        "hot_path",
        "What a wrapper adds per parameter to forward and backward of 300 x Linear(32).",
        "python -m benchmarks.hot_path --ranks 1 --profile",
    )
    parser.add_argument(
        "--ranks", type=command.integers, default=[1, 2], metavar="N,M", help="default: 1,2"
    )
    parser.add_argument("--rounds", type=command.positive, default=20, help="default: 20")
    parser.add_argument(
        "--steps", type=command.positive, default=8, help="of a variant in a round (default: 8)"
    )
    parser.add_argument(
        "--profile", action="store_true", help="also run paceline under cProfile, on one rank"
    )
    parser.add_argument(
        "--also",
        type=parse_variant,
        action="append",
        default=[],
        metavar="LABEL=MODULE:CLASS",
        help="a further wrapper to run beside the others; may be repeated",
    )
    return parser


def _run(args: argparse.Namespace) -> int:
    console = command.console()
    variants = (*STANDARD, HOOKS_ONLY, *args.also)
    results = [_measure(args, ranks, variants) for ranks in args.ranks]
    for result in results:
        console.print(_table(result))
    profiles = []
    if args.profile:
        for variant in (STANDARD[-1], *args.also):
            (lines,) = run_ranks(1, profiling.profile_steps, variant, timeout_s=args.timeout)
            console.print(profiling.table(lines, variant.label))
            profiles.append({"variant": variant.label, "lines": [asdict(line) for line in lines]})
    measured = [result.to_json() for result in results]
    command.write_json(args.json, {"results": measured, "profiles": profiles})
    return 0


def _measure(args: argparse.Namespace, ranks: int, variants: tuple[Variant, ...]) -> Result:
    schedule = Schedule(WORKLOAD, variants, args.rounds, args.steps, are_all_reduced=False)
    parts = {}
    for part, step in PARTS.items():
        bar = RoundBar(f"{part}, {ranks} rank{'s'[: ranks > 1]}", args.rounds)
        per_rank = run_ranks(ranks, run_rank, schedule, bar, step, timeout_s=args.timeout)
        parts[part] = mean_over_ranks(per_rank)
    return Result(ranks, parts)


def _table(result: Result) -> Table:
    table = Table(title=f"microseconds added per parameter, {result.ranks} rank(s)")
    table.add_column("variant", no_wrap=True)
    for part in result.parts:
        table.add_column(f"{part}, CPU", justify="right")
        table.add_column(f"{part}, wall", justify="right")
    for label in result.parts["backward"]:
        if label != LOCAL:
            table.add_row(label, *_cells(result, label))
    return table


def _cells(result: Result, label: str) -> list[str]:
    cells = []
    for part in result.parts:
        for clock in ("cpu_ms", "wall_ms"):
            added = result.added_us(part, label, clock)
            cells.append(f"{added.value:.2f} ({added.low:.2f} to {added.high:.2f})")
    return cells


if __name__ == "__main__":
    sys.exit(main())
