"""What ``paceline bench ddp`` shows: the table, the advice, the targets of our own models."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rich.markup import escape

from paceline.cli.bench.ddp_ranks import Measured
from paceline.cli.bench.harness import plot, report
from paceline.cli.bench.harness.comparison import Comparison
from paceline.cli.bench.harness.contenders import LOCAL, PACELINE, TORCH, TORCH_VIEWS
from paceline.cli.bench.harness.estimates import Estimate, p50, ratio

TARGETS = {
    "mlp": (1.7, 1.7, 1.10),
    "transformer": (1.15, 1.2, 1.10),
    "small": (1.2, 1.0, None),
}
"""How many times as fast as torch's better mode Paceline has to be, on 2 ranks and on more; and how
long a step may take on 2 ranks, as a multiple of one without communication."""


def against_better_torch(comparison: Comparison) -> Estimate:
    """How many times as fast as torch's better mode Paceline is."""
    better = min(TORCH, TORCH_VIEWS, key=lambda name: p50(comparison.times_ms[name]))
    return comparison.speed(PACELINE, over=better)


def is_met(result: Measured) -> bool:
    """Whether Paceline is within the targets of this model; a user's has none."""
    if result.model not in TARGETS:
        return True
    on_two, on_more, most_over_local = TARGETS[result.model]
    times = result.comparison.times_ms
    over_local = ratio(times[PACELINE], times[LOCAL]).value
    if result.ranks == 2 and most_over_local is not None and over_local > most_over_local:
        return False
    return against_better_torch(result.comparison).value >= (
        on_two if result.ranks < 3 else on_more
    )


def show(
    args: argparse.Namespace, results: Sequence[Measured], advice: Mapping[str, Sequence[str]]
) -> bool:
    """Print, write and draw; return whether all targets are met."""
    by_title = {each.comparison.title: each for each in results}

    def cpu_ms(comparison: Comparison, name: str) -> str:
        return f"{p50(by_title[comparison.title].cpu_ms[name]):.1f}"

    def over_local(comparison: Comparison, name: str) -> str:
        times = comparison.times_ms
        return "" if name == LOCAL else f"{ratio(times[name], times[LOCAL]).value:.2f}"

    comparisons = [each.comparison for each in results]
    more = {"CPU ms": cpu_ms, "time / local": over_local}
    console = report.console()
    console.print(report.table("forward + backward", comparisons, TORCH, more))
    for title, sentences in advice.items():
        console.print(f"[bold]{escape(title)}[/]")
        for sentence in sentences:
            console.print(f"  {escape(sentence)}", highlight=False, soft_wrap=True)
    met = {each.comparison.title: is_met(each) for each in results}
    if args.check:
        for title, is_one in met.items():
            found = escape(str(against_better_torch(by_title[title].comparison)))
            word = "[green]met[/]" if is_one else "[red]missed[/]"
            console.print(f"target, {title}: {word}; {found} x torch's better mode")
    document = [
        {
            **each.comparison.to_json(),
            "cpu_ms": each.cpu_ms,
            "contenders": [asdict(contender) for contender in each.contenders],
            "advice": list(advice[each.comparison.title]),
            "against_better_torch": asdict(against_better_torch(each.comparison)),
            "is_met": met[each.comparison.title],
        }
        for each in results
    ]
    report.write_json(args.json, {"comparisons": document})
    if args.plot is not None:
        plot.draw_comparisons(args.plot, "forward + backward", comparisons)
    return all(met.values())
