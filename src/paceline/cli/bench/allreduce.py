"""``paceline bench allreduce``: all-reduce of a user's tensor, all contenders in turn.

What the ranks do is in :mod:`paceline.cli.bench.allreduce_ranks`; who can take part is found out by
:mod:`paceline.cli.bench.allreduce_contenders`.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from paceline.cli.bench.allreduce_contenders import CONTENDERS, GLOO, PACELINE, find_contenders
from paceline.cli.bench.harness.options import add_outputs, describe, integers, one_of, positive
from paceline.cli.bench.harness.options import sizes as read_sizes
from paceline.errors import ConfigurationError

if TYPE_CHECKING:
    from paceline.cli.bench.harness.comparison import Comparison

SIZES = "256,64K,1M,25M"
EXAMPLE = """\
paceline bench allreduce --ranks 2 --sizes 64K,1M --rounds 4 --json allreduce.json
paceline bench allreduce --ranks 2 --sizes 1M --rounds 4 --contenders gloo,paceline"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    describe(parser, EXAMPLE)
    parser.add_argument(
        "--ranks", type=integers, default=[2, 4], metavar="N,M", help="default: 2,4"
    )
    parser.add_argument(
        "--sizes",
        type=read_sizes,
        default=read_sizes(SIZES),
        metavar="BYTES,BYTES",
        help=f"of the float32 tensor (default: {SIZES})",
    )
    parser.add_argument(
        "--rounds", type=positive, default=10, metavar="N", help="of all contenders (default: 10)"
    )
    parser.add_argument(
        "--contenders",
        type=one_of(list(CONTENDERS)),
        metavar="A,B",
        help=f"of {', '.join(CONTENDERS)} (default: those that are installed)",
    )
    add_outputs(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and show."""
    if min(args.ranks) < 2:
        raise ConfigurationError("--ranks 1: one rank has nothing to reduce; write 2 or more")
    from paceline.cli.bench.allreduce_ranks import measure
    from paceline.cli.bench.harness import plot, report

    console = report.console()
    chosen = find_contenders(args.contenders)
    for name, reason in chosen.missing.items():
        console.print(f"not measured: {name}: {reason}", highlight=False)
    comparisons: list[Comparison] = []
    for ranks in args.ranks:
        found = measure(ranks, args.sizes, args.rounds, chosen, args.timeout)
        comparisons += found
        console.print(report.table(f"all_reduce, float32, {ranks} ranks", found, GLOO))
    report.write_json(args.json, {"comparisons": [each.to_json() for each in comparisons]})
    if args.plot is not None:
        plot.draw_comparisons(args.plot, "all_reduce, float32", comparisons)
    return 0


__all__ = ["GLOO", "PACELINE", "add_arguments", "run"]
