"""``paceline bench hooks``: the options, the table, the plot, and who wins where.

What the ranks measure is in :mod:`paceline.cli.bench.hooks_ranks`, which brings torch with it and
is imported late. Times over a link are then predicted: a step without communication, plus what the
hook computes beyond that, plus its bytes at the speed of the link. Overlap would make all of them
faster.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from paceline.errors import ConfigurationError

if TYPE_CHECKING:
    from paceline.cli.bench.hooks_ranks import HookSample

LINKS = {"0.1 Gbit": 1e8, "1 Gbit": 1e9, "10 Gbit": 1e10, "100 Gbit": 1e11}
MODELS = ("mlp", "transformer", "small")
TIMEOUT_S = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--steps", type=int, default=5, help="measured for each hook (default: 5)")
    parser.add_argument(
        "--model",
        default="mlp",
        metavar="NAME",
        help=f"{', '.join(MODELS)}, or MODULE:FUNCTION of your own that returns (module, batch); "
        "default: mlp",
    )
    parser.add_argument(
        "--hooks", default="", metavar="A,B", help="which hooks; default: all that make sense"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw it (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    """Measure on this machine and print what came out."""
    try:
        samples = _measure(args)
    except ConfigurationError as error:
        print(f"paceline bench hooks: {error}", file=sys.stderr)
        return 2
    console = Console()
    console.print(_table(args, samples))
    for sentence in winners(samples):
        console.print(sentence)
    if args.plot is not None:
        _plot(args.plot, samples, args)
        console.print(f"plot: {args.plot}")
    return 0


def _measure(args: argparse.Namespace) -> list[HookSample]:
    if args.ranks < 2:
        raise ConfigurationError(f"--ranks {args.ranks}: nothing is sent by less than 2 ranks")
    if args.steps < 1:
        raise ConfigurationError(f"--steps {args.steps}: at least 1 step is measured")
    if args.plot is not None:
        _check_plot(args.plot)
    from paceline.cli.bench.hooks_ranks import check_model, check_names, measure_on_rank
    from paceline.testing import run_ranks

    check_model(args.model)
    names = check_names([name for name in args.hooks.split(",") if name])
    per_rank = run_ranks(
        args.ranks, measure_on_rank, args.model, names, args.steps, timeout_s=TIMEOUT_S
    )
    first: list[HookSample] = per_rank[0]
    return first


def _check_plot(path: Path) -> None:
    """Find out before anything is measured whether the plot can be written."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError(
            "--plot needs matplotlib: pip install matplotlib, or leave --plot out"
        )
    if not path.parent.is_dir():
        raise ConfigurationError(f"--plot {path}: there is no directory {path.parent}")
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in kinds:
        raise ConfigurationError(
            f"--plot {path}: it cannot be drawn as {path.suffix or 'a file without a suffix'}; "
            f"write one of: {', '.join(sorted(kinds))}"
        )


def _table(args: argparse.Namespace, samples: Sequence[HookSample]) -> Table:
    plain = samples[0]
    table = Table(
        title=f"{args.model}, {args.ranks} ranks. Sent: MB a step, counted at rank 0's sockets. "
        "Right: ms a step, predicted for links of so many bits a second",
    )
    table.add_column("hook", no_wrap=True)
    for heading in ("sent", "ratio", "CPU ms", *LINKS):
        table.add_column(heading, justify="right", no_wrap=True)
    fastest = {link: min(s.step_ms(bits) for s in samples) for link, bits in LINKS.items()}
    for sample in samples:
        cells = [
            f"[bold green]{sample.step_ms(bits):.1f}[/]"
            if sample.step_ms(bits) == fastest[link]
            else f"{sample.step_ms(bits):.1f}"
            for link, bits in LINKS.items()
        ]
        table.add_row(
            sample.name,
            f"{sample.sent_bytes / 1e6:.3f}",
            f"{sample.sent_bytes / plain.sent_bytes:.3f}",
            f"{sample.compute_ms:.1f}",
            *cells,
        )
    return table


def winners(samples: Sequence[HookSample]) -> list[str]:
    """Say which hook is fastest in which range of speeds, from slow to fast."""
    sentences: list[str] = []
    began, best = 0.0, ""
    for exponent in range(60, 121):
        bits = 10 ** (exponent / 10)
        name = min(samples, key=lambda sample, b=bits: sample.step_ms(b)).name  # type: ignore[misc]
        if name != best:
            if best:
                sentences.append(f"{_speed(began)} to {_speed(bits)}: {best}")
            began, best = bits, name
    sentences.append(f"from {_speed(began)}: {best}")
    return sentences


def _speed(bits_per_s: float) -> str:
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits_per_s >= size:
            return f"{bits_per_s / size:.3g} {unit}"
    return f"{bits_per_s:.3g} bit/s"


def _plot(path: Path, samples: Sequence[HookSample], args: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    speeds = [10 ** (exponent / 10) for exponent in range(70, 112)]
    for sample in samples:
        axes.plot([s / 1e9 for s in speeds], [sample.step_ms(s) for s in speeds], label=sample.name)
    axes.set(xscale="log", yscale="log", xlabel="link, Gbit/s", ylabel="step, ms (predicted)")
    axes.set_title(f"{args.model}, {args.ranks} ranks")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
