"""``paceline bench dp``: DataParallel on CPU replicas beside the plain module, in one process.

What is measured is in :mod:`paceline.cli.bench.dp_process`.
"""

from __future__ import annotations

import argparse

from paceline.cli.bench.harness.options import add_outputs, describe, one_of, positive

PLAIN, CONTROL, PARALLEL = "plain", "plain again", "replicas"
MODELS = {
    "matmul": "4 x Linear(2048), batch 1024",
    "lstm": "hidden 256, 100 steps, batch 64",
    "cells": "the same LSTM as a Python loop",
    "small": "20 x Linear(64) + LayerNorm + GELU",
}
MOST_OVER_PLAIN = {"matmul": 1.25, "lstm": 1.25}
"""Targets of ours: the most that replicas may take, as a multiple of the plain module."""
PARTS_LIMIT_MS = 1.0
EXAMPLE = "paceline bench dp --models small --launches 1 --rounds 4"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    describe(parser, EXAMPLE)
    models = "; ".join(f"{name}: {text}" for name, text in MODELS.items())
    parser.add_argument(
        "--models",
        type=one_of(list(MODELS)),
        default=list(MODELS),
        metavar="A,B",
        help=f"{models} (default: all)",
    )
    parser.add_argument(
        "--replicas", type=positive, default=2, help="threads that share the batch (default: 2)"
    )
    parser.add_argument(
        "--threads", type=positive, default=2, help="intra-op threads in all (default: 2)"
    )
    parser.add_argument(
        "--launches", type=positive, default=2, help="in fresh processes (default: 2)"
    )
    parser.add_argument("--rounds", type=positive, default=10, help="default: 10")
    parser.add_argument("--steps", type=positive, help="of a contender in a round")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    add_outputs(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and show; 1 with --check if a target is missed."""
    from paceline.cli.bench.dp_process import measure, measure_parts
    from paceline.cli.bench.harness import plot, report

    comparisons = [measure(name, args) for name in args.models]
    parts_ms = measure_parts(args)
    console = report.console()
    title = f"forward + backward, one process, {args.replicas} replicas"
    console.print(report.table(title, comparisons, PLAIN))
    console.print(
        f"scatter + replicate + gather of 100 parameters: {parts_ms:.2f} ms "
        f"(target: {PARTS_LIMIT_MS:.1f} ms)"
    )
    report.write_json(
        args.json,
        {"comparisons": [each.to_json() for each in comparisons], "parts_ms": parts_ms},
    )
    if args.plot is not None:
        plot.draw_comparisons(args.plot, title, comparisons)
    slowest = {name: 1 / limit for name, limit in MOST_OVER_PLAIN.items()}
    missed = [c.title for c in comparisons if c.speed(PARALLEL).value < slowest.get(c.title, 0.0)]
    if args.check and missed:
        console.print(f"[red]target missed[/]: {', '.join(missed)}")
    return 1 if args.check and (missed or parts_ms > PARTS_LIMIT_MS) else 0
