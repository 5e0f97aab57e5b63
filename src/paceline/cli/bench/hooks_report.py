"""What ``paceline bench hooks`` shows: a table, who wins at which speed, what it loses, a plot."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from rich.markup import escape
from rich.table import Table

from paceline.cli.bench.harness import plot, report
from paceline.cli.bench.harness.comparison import Comparison
from paceline.cli.bench.hooks import BASELINE
from paceline.cli.bench.hooks_accuracy import Loss, difference
from paceline.cli.bench.hooks_ranks import HookCosts

LINKS = {"0.1 Gbit": 1e8, "1 Gbit": 1e9, "10 Gbit": 1e10, "100 Gbit": 1e11}


def show(
    args: argparse.Namespace,
    costs: HookCosts,
    accuracies: Mapping[str, Sequence[float]],
    why_not: str,
) -> dict[str, Any]:
    """Print and draw; return everything for JSON."""
    comparisons = [costs.over(link, bits) for link, bits in LINKS.items()]
    losses = {
        name: difference(found, accuracies[BASELINE])
        for name, found in accuracies.items()
        if name != BASELINE
    }
    console = report.console()
    console.print(_table(args, costs, comparisons, losses))
    for sentence in (*winners(costs), *_verdicts(comparisons, losses), why_not):
        if sentence:
            console.print(escape(sentence), highlight=False, soft_wrap=True)
    if args.plot is not None:
        _draw(args.plot, args, costs, comparisons)
        console.print(f"plot: {args.plot}")
    return {
        "model": args.model,
        "ranks": args.ranks,
        "sent_bytes": {name: costs.sent_bytes(name) for name in costs.names},
        "compute_ms": {name: costs.compute_ms(name) for name in costs.names},
        "links": [each.to_json() for each in comparisons],
        "accuracy": {name: list(found) for name, found in accuracies.items()},
        "accuracy_points_lost": {name: asdict(each) for name, each in losses.items()},
    }


def _table(
    args: argparse.Namespace,
    costs: HookCosts,
    comparisons: Sequence[Comparison],
    losses: Mapping[str, Loss],
) -> Table:
    table = Table(
        title=f"{args.model}, {args.ranks} ranks. Sent: MB a step, counted at rank 0's sockets. "
        "Right: ms a step, predicted for links of so many bits a second; ★ fastest, ties included. "
        f"Accuracy: points against {BASELINE}, mean (least to most) of {args.seeds} trainings",
    )
    table.add_column("hook", no_wrap=True)
    for heading in ("sent", "ratio", "CPU ms", *LINKS, "accuracy"):
        table.add_column(heading, justify="right", no_wrap=True)
    plain_bytes = costs.sent_bytes(BASELINE)
    for name in costs.names:
        cells = []
        for comparison in comparisons:
            text = f"{comparison.time_ms(name).value:.1f}"
            cells.append(f"[bold green]{text} ★[/]" if name in comparison.winners else text)
        table.add_row(
            name,
            f"{costs.sent_bytes(name) / 1e6:.3f}",
            f"{costs.sent_bytes(name) / plain_bytes:.3f}",
            f"{median(costs.compute_ms(name)):.1f}",
            *cells,
            str(losses.get(name, "")),
        )
    return table


def _verdicts(comparisons: Sequence[Comparison], losses: Mapping[str, Loss]) -> list[str]:
    """For each link: the winner, its ratio with an interval, and what it loses."""
    sentences = []
    for comparison in comparisons:
        winners = comparison.winners
        if BASELINE in winners:
            sentences.append(f"{comparison.title}: no hook is faster than {BASELINE} for certain")
            continue
        best = min(winners, key=lambda name: comparison.time_ms(name).value)
        text = f"{comparison.title}: {best} is {comparison.speed(best)} x as fast as {BASELINE}"
        if best in losses:
            text += f"; accuracy {losses[best]} points"
        sentences.append(text)
    return sentences


def winners(costs: HookCosts) -> list[str]:
    """Say which hook is fastest in which range of speeds, from slow to fast."""
    sentences: list[str] = []
    began, best = 0.0, ""
    for exponent in range(60, 121):
        bits = 10 ** (exponent / 10)
        medians = {name: median(costs.step_ms(name, bits)) for name in costs.names}
        name = min(medians, key=lambda each: medians[each])
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


def _draw(
    path: Path, args: argparse.Namespace, costs: HookCosts, comparisons: Sequence[Comparison]
) -> None:
    """Draw step times over the speed of the link, and ratios with intervals at four speeds."""
    figure, panels = plot.subplots(1 + len(comparisons), len(costs.names))
    speeds = [10 ** (exponent / 10) for exponent in range(70, 112)]
    for name in costs.names:
        times = [median(costs.step_ms(name, bits)) for bits in speeds]
        panels[0].plot([bits / 1e9 for bits in speeds], times, label=name)
    panels[0].set(xscale="log", yscale="log", xlabel="link, Gbit/s", ylabel="step, ms (predicted)")
    panels[0].grid(True, which="both", alpha=0.3)
    panels[0].legend(fontsize=7)
    for panel, comparison in zip(panels[1:], comparisons, strict=False):
        plot.draw_panel(panel, comparison)
    plot.save(figure, path, f"{args.model}, {args.ranks} ranks")
