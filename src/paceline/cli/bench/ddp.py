"""``paceline bench ddp``: a training step with several wrappers and settings, and what to change.

The options, the start of the ranks and what is shown. What the ranks do is in
:mod:`paceline.cli.bench.ddp_ranks`, what follows from the numbers in
:mod:`paceline.cli.bench.ddp_advice`.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from paceline.cli.bench.harness.models import MODELS, add_model
from paceline.cli.bench.harness.options import add_outputs, describe, integers, one_of, positive
from paceline.errors import ConfigurationError

if TYPE_CHECKING:
    from paceline.cli.bench.ddp_ranks import Measured
    from paceline.cli.bench.harness.contenders import Contender
    from paceline.cli.bench.harness.workloads import WorkloadProbe

EXAMPLE = """\
paceline bench ddp --model small --ranks 2 --launches 1 --rounds 4
paceline bench ddp --model small --ranks 2 --launches 1 --rounds 8 --compare wrappers,hooks
paceline bench ddp --model paceline.cli.bench.example_model:make --launches 1 --rounds 8"""
WRAPPERS = "wrappers"
COMPARE = (WRAPPERS, "transports", "buckets", "hooks")
HOOKS = ("fp16", "int8", "powersgd")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    describe(parser, EXAMPLE)
    add_model(parser, "mlp,transformer,small", several=True)
    parser.add_argument(
        "--compare",
        type=one_of(COMPARE),
        metavar="A,B",
        help=f"of {', '.join(COMPARE)}; the wrappers are torch's and ours, the rest are settings "
        "of ours (default: wrappers; for a model of yours all)",
    )
    parser.add_argument(
        "--ranks", type=integers, default=[2], metavar="N,M", help="on this machine (default: 2)"
    )
    parser.add_argument(
        "--launches", type=positive, default=2, help="in fresh processes (default: 2)"
    )
    parser.add_argument(
        "--rounds", type=positive, default=10, help="of all contenders, each launch (default: 10)"
    )
    parser.add_argument(
        "--steps", type=positive, help="of a contender in a round (default: about 200 ms)"
    )
    add_outputs(parser)
    ours = parser.add_argument_group("for work on Paceline itself")
    ours.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="LABEL=MODULE:CLASS",
        help="a further wrapper to run beside the others; may be repeated",
    )
    ours.add_argument(
        "--control",
        action="store_true",
        help="run torch with views a second time: how far its ratio is from 1 is the noise",
    )
    ours.add_argument(
        "--check", action="store_true", help="exit with 1 if a target of ours is missed"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, show, advise; 1 with --check if a target is missed."""
    from paceline.cli.bench.ddp_advice import advise
    from paceline.cli.bench.ddp_ranks import measure
    from paceline.cli.bench.ddp_report import show

    names = _names(args.model)
    results: list[Measured] = []
    for name in names:
        probe = _probe(name, args)
        for ranks in args.ranks:
            contenders = _contenders(args, name, probe)
            _check_memory(probe, ranks * len(contenders), args)
            results.append(measure(name, ranks, contenders, args))
    advice = {each.comparison.title: advise(each.comparison, each.contenders) for each in results}
    is_met = show(args, results, advice)
    return 1 if args.check and not is_met else 0


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in MODELS and ":" not in name:
            known = ", ".join(MODELS)
            raise ConfigurationError(
                f"--model {name}: there is no such model; write {known}, or MODULE:FUNCTION"
            )
    if not names:
        raise ConfigurationError("--model: name at least one")
    return names


def _probe(name: str, args: argparse.Namespace) -> WorkloadProbe:
    """Try the model in one process first: an error is then told once, and in our words."""
    from paceline.cli.bench.harness import workloads
    from paceline.testing import run_ranks

    [found] = run_ranks(1, workloads.probe, name, timeout_s=args.timeout)
    if found.problem:
        raise ConfigurationError(found.problem)
    return found


def _contenders(args: argparse.Namespace, name: str, probe: WorkloadProbe) -> tuple[Contender, ...]:
    from paceline.cli.bench.harness import contenders as known

    compare = args.compare or ([WRAPPERS] if name in MODELS else COMPARE)
    found = list(known.WRAPPERS)
    if "transports" in compare:
        found += known.transports()
    if "buckets" in compare:
        found += known.bucket_sizes(probe.gradient_bytes)
    if "hooks" in compare:
        found += [known.hooked(hook) for hook in HOOKS]
    found += [_also(text) for text in args.also]
    return (*found, *([known.CONTROL] if args.control else []))


def _also(text: str) -> Contender:
    from paceline.cli.bench.harness.contenders import parse_contender

    try:
        return parse_contender(text)
    except argparse.ArgumentTypeError as error:
        raise ConfigurationError(f"--also {error}") from error


def _check_memory(probe: WorkloadProbe, processes: int, args: argparse.Namespace) -> None:
    """Refuse what would swap: all contenders live at the same time."""
    from paceline.cli.bench.harness.resident import available_bytes

    needed, free = processes * 2 * probe.step_bytes, available_bytes()
    if free is not None and needed > 0.8 * free:
        raise ConfigurationError(
            f"{processes} processes with this model need about {needed / 2**30:.1f} GiB, and "
            f"{free / 2**30:.1f} are free: measure fewer --ranks, or --compare wrappers"
        )
