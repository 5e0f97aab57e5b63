"""Microseconds per gradient: what a wrapper adds to 300 x Linear(32), over its 600 parameters.

``python -m benchmarks hot_path --help``. On one rank nothing travels, so what is left is
bookkeeping; on two, communication comes on top. ``--profile`` shows where Paceline's part goes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch.distributed as dist
from rich.table import Table
from torch import nn

from benchmarks import profiling
from benchmarks.floor import HOOKS_ONLY
from paceline.cli.bench.harness import malloc, report, workloads
from paceline.cli.bench.harness.contenders import LOCAL, WRAPPERS, Contender, parse_contender
from paceline.cli.bench.harness.estimates import Estimate, estimate
from paceline.cli.bench.harness.interleave import (
    Cost,
    Samples,
    Step,
    Stopwatch,
    mean_over_ranks,
    take_turns,
)
from paceline.cli.bench.harness.options import add_outputs, describe, integers, positive
from paceline.cli.bench.harness.progress import RoundBar
from paceline.cli.bench.harness.workloads import loss_of
from paceline.testing import run_ranks

WORKLOAD = "small"
PARAMETERS = 600
WARM_UP = 4


def time_forward(model: nn.Module, batch: Any) -> Cost:
    """Only the forward; the backward runs too."""
    model.zero_grad(set_to_none=True)
    watch = Stopwatch()
    loss = loss_of(model, batch)
    cost = watch.read()
    loss.backward()
    return cost


def time_backward(model: nn.Module, batch: Any) -> Cost:
    """Only the backward."""
    model.zero_grad(set_to_none=True)
    loss = loss_of(model, batch)
    watch = Stopwatch()
    loss.backward()
    return watch.read()


PARTS: dict[str, Step] = {"forward": time_forward, "backward": time_backward}


@dataclass(frozen=True)
class Result:
    """What was measured on one number of ranks: costs by part, then as in Samples."""

    ranks: int
    parts: dict[str, Samples]

    def added_us(self, part: str, label: str, clock: str) -> Estimate:
        """Microseconds that a contender adds per parameter, by the median of rounds."""
        rounds = zip(self.parts[part][label], self.parts[part][LOCAL], strict=True)
        added = [
            (_median_ms(mine, clock) - _median_ms(plain, clock)) * 1e3 / PARAMETERS
            for mine, plain in rounds
        ]
        return estimate(added)

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    describe(parser, "python -m benchmarks hot_path --ranks 1 --profile")
    add_outputs(parser, plot=False)
    parser.add_argument(
        "--ranks", type=integers, default=[1, 2], metavar="N,M", help="default: 1,2"
    )
    parser.add_argument("--rounds", type=positive, default=20, help="default: 20")
    parser.add_argument(
        "--steps", type=positive, default=8, help="of a variant in a round (default: 8)"
    )
    parser.add_argument(
        "--profile", action="store_true", help="also run paceline under cProfile, on one rank"
    )
    parser.add_argument(
        "--also",
        type=parse_contender,
        action="append",
        default=[],
        metavar="LABEL=MODULE:CLASS",
        help="a further wrapper to run beside the others; may be repeated",
    )


def run(args: argparse.Namespace) -> int:
    """Measure and show."""
    console = report.console()
    contenders = (*WRAPPERS, HOOKS_ONLY, *args.also)
    results = [_measure(args, ranks, contenders) for ranks in args.ranks]
    for result in results:
        console.print(_table(result))
    profiles = []
    if args.profile:
        for contender in (WRAPPERS[-1], *args.also):
            (lines,) = run_ranks(1, profiling.profile_steps, contender, timeout_s=args.timeout)
            console.print(profiling.table(lines, contender.label))
            profiles.append({"variant": contender.label, "lines": [asdict(line) for line in lines]})
    measured = [result.to_json() for result in results]
    report.write_json(args.json, {"results": measured, "profiles": profiles})
    return 0


def _measure(args: argparse.Namespace, ranks: int, contenders: tuple[Contender, ...]) -> Result:
    parts = {}
    for part, step in PARTS.items():
        bar = RoundBar(f"{part}, {ranks} rank{'s'[: ranks > 1]}", args.rounds)
        per_rank = run_ranks(
            ranks, run_rank, contenders, step, args.steps, bar, timeout_s=args.timeout
        )
        parts[part] = mean_over_ranks(per_rank)
    return Result(ranks, parts)


def run_rank(contenders: tuple[Contender, ...], step: Step, steps: int, bar: RoundBar) -> Samples:
    """Run all contenders in this process, in turn; called on every rank."""
    malloc.keep_memory()
    models = {each.label: each.wrap(workloads.make(WORKLOAD).module) for each in contenders}
    batch = workloads.batch(workloads.make(WORKLOAD), seed=dist.get_rank())
    for model in models.values():
        for _ in range(WARM_UP):
            step(model, batch)

    def turn(label: str) -> list[Cost]:
        dist.barrier()  # ranks leave the previous contender at different times
        return [step(models[label], batch) for _ in range(steps)]

    bar.is_shown = dist.get_rank() == 0
    return take_turns(list(models), bar, turn)


def _table(result: Result) -> Table:
    table = Table(title=f"microseconds added per parameter, {result.ranks} rank(s)")
    table.add_column("contender", no_wrap=True)
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
