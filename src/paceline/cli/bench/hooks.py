"""``paceline bench hooks``: what each communication hook sends, costs and loses; who wins where.

What the ranks measure is in :mod:`paceline.cli.bench.hooks_ranks`. Times over a link are then
predicted: a step without communication, plus what the hook computes beyond that, plus its bytes at
the speed of the link. Overlap would make all of them faster.
"""

from __future__ import annotations

import argparse
import importlib.util
from typing import TYPE_CHECKING

from paceline.cli.bench.harness.models import add_model
from paceline.cli.bench.harness.options import add_outputs, describe, positive
from paceline.errors import ConfigurationError, UnknownHookError

if TYPE_CHECKING:
    from paceline.cli.bench.hooks_ranks import HookCosts

BASELINE, NOOP = "allreduce", "noop"
HOOKS = (BASELINE, "fp16", "bf16", "int8", "e4m3", "sign", "powersgd", "topk")
EXAMPLE = """\
paceline bench hooks --model small --hooks int8,powersgd --rounds 4 --epochs 2
paceline bench hooks --model paceline.cli.bench.example_model:make --hooks fp16 --seeds 0"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    describe(parser, EXAMPLE)
    add_model(parser, "transformer", several=False)
    parser.add_argument("--ranks", type=positive, default=2, help="processes (default: 2)")
    parser.add_argument(
        "--rounds", type=positive, default=10, help="a step of every hook in each (default: 10)"
    )
    parser.add_argument(
        "--hooks",
        default="",
        metavar="A,B",
        help=f"of {', '.join(HOOKS)} (default: all; {BASELINE} always takes part)",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=3,
        help="trainings for accuracy, with each hook and on the same data (default: 3; 0: none)",
    )
    parser.add_argument(
        "--epochs", type=positive, default=8, help="of each training for accuracy (default: 8)"
    )
    add_outputs(parser)


def run(args: argparse.Namespace) -> int:
    """Measure on this machine and print what came out."""
    if args.ranks < 2:
        raise ConfigurationError(f"--ranks {args.ranks}: nothing is sent by less than 2 ranks")
    if args.seeds < 0:
        raise ConfigurationError(f"--seeds {args.seeds}: 0 or more")
    names = _check_names([name for name in args.hooks.split(",") if name])
    from paceline.cli.bench import hooks_report
    from paceline.cli.bench.harness import report, workloads
    from paceline.testing import run_ranks

    [probe] = run_ranks(1, workloads.probe, args.model, timeout_s=args.timeout)
    if probe.problem:
        raise ConfigurationError(probe.problem)
    costs = _measure(args, names)
    losses, why_not = _train(args, names)
    document = hooks_report.show(args, costs, losses, why_not)
    report.write_json(args.json, document)
    return 0


def _check_names(names: list[str]) -> list[str]:
    unknown = [name for name in names if name not in HOOKS]
    if unknown:
        raise UnknownHookError(
            f"there is no hook {unknown[0]!r} to measure; there are: {', '.join(HOOKS)}"
        )
    return [name for name in HOOKS if name == BASELINE or not names or name in names]


def _measure(args: argparse.Namespace, names: list[str]) -> HookCosts:
    from paceline.cli.bench.harness.progress import RoundBar
    from paceline.cli.bench.hooks_ranks import measure_on_rank
    from paceline.testing import run_ranks

    bar = RoundBar(f"steps of {args.model}, {args.ranks} ranks", args.rounds)
    found = run_ranks(args.ranks, measure_on_rank, args.model, names, bar, timeout_s=args.timeout)
    return found[0]


def _train(args: argparse.Namespace, names: list[str]) -> tuple[dict[str, list[float]], str]:
    """Return what trainings with each hook got right, by seed; or why there are none."""
    if args.seeds == 0:
        return {}, "accuracy was not measured: --seeds 0"
    if importlib.util.find_spec("sklearn") is None:
        return {}, "accuracy was not measured: its digits need scikit-learn, which is missing"
    from paceline.cli.bench.harness.progress import RoundBar
    from paceline.cli.bench.hooks_accuracy import train_on_rank
    from paceline.testing import run_ranks

    bar = RoundBar(f"trainings of {args.epochs} epochs", args.seeds * len(names))
    found = run_ranks(
        args.ranks, train_on_rank, names, args.seeds, args.epochs, bar, timeout_s=args.timeout
    )
    return found[0], ""
