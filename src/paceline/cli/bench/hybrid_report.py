"""What ``paceline bench hybrid`` makes of its numbers: machine facts, tables, ratios, JSON, a plot.

Called by :mod:`paceline.cli.bench.hybrid` in the process of the command. Measures nothing.

Words: the *rate* of an epoch is its examples over its seconds. The rate of *all* trainers in a
cycle is all their examples over the seconds of the slowest of them. 'ex/s' beside pN is the rate
that all but (100 - N) % of the epochs reach, so both columns of pN speak of slow epochs.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from paceline.cli.bench.hybrid_plan import BATCHES, HybridPlan, RouteName
from paceline.cli.bench.hybrid_ranks import TrainerResult

PERCENTILES = (50, 75, 90, 95)


def percentile(values: Sequence[float], percent: float) -> float:
    """Interpolate between the neighbours in rank order."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


class Report:
    """All that was measured in one run."""

    def __init__(self, plan: HybridPlan, results: Sequence[TrainerResult]) -> None:
        self.plan = plan
        self.results = results

    # --- numbers -------------------------------------------------------------------------------

    def seconds(self, route: RouteName, trainer: int | None) -> list[float]:
        """Return the seconds of the epochs of one trainer; for None, of the slowest in a cycle."""
        if trainer is not None:
            return [sample.seconds for sample in self.results[trainer].samples[route.value]]
        return [max(s.seconds for s in cycle) for cycle in self._cycles(route)]

    def rates(self, route: RouteName, trainer: int | None) -> list[float]:
        """Return examples per second of the epochs of one trainer; for None, of all together."""
        if trainer is not None:
            samples = self.results[trainer].samples[route.value]
            return [sample.examples / sample.seconds for sample in samples]
        return [
            sum(s.examples for s in cycle) / max(s.seconds for s in cycle)
            for cycle in self._cycles(route)
        ]

    def ratio(self, route: RouteName, base: RouteName) -> tuple[float, float, float]:
        """Return how many times the rate of ``base`` a route has: median and quartiles.

        Cycle by cycle. The two epochs of a cycle ran within seconds of each other if both routes
        go over RPC, and within one launch otherwise.
        """
        pairs = zip(self.rates(route, None), self.rates(base, None), strict=True)
        found = [rate / other for rate, other in pairs]
        return statistics.median(found), percentile(found, 25), percentile(found, 75)

    def _cycles(self, route: RouteName) -> list[tuple[Any, ...]]:
        return list(zip(*(r.samples[route.value] for r in self.results), strict=True))

    # --- text ----------------------------------------------------------------------------------

    def facts(self) -> str:
        """Say what was measured, and on what."""
        plan, machine = self.plan, machine_facts()
        notes = self.results[0].notes
        shape = (
            f"{plan.trainers} trainers, {plan.servers} servers, {plan.tables} tables of "
            f"{plan.embeddings} x {plan.dim}, {BATCHES} batches an epoch, {plan.cycles} cycles "
            f"after {plan.warmup_cycles} to warm up, {plan.launches} launches"
        )
        journal = "with" if plan.journal else "without"
        how = f"{plan.optimizer.value}; ps {journal} a journal"
        return "\n".join(
            [
                " · ".join(f"{name} {value}" for name, value in machine.items()),
                shape,
                how if plan.optimizer.difference is None else f"{how}; {plan.optimizer.difference}",
                *(f"{name}: dense gradients over {over}" for name, over in notes.items()),
            ]
        )

    def tables(self) -> list[Table]:
        """Lay out each route: seconds per epoch and rates, for each trainer and for all."""
        return [self._table(route) for route in self.plan.routes]

    def _table(self, route: RouteName) -> Table:
        title = f"{route.value}: seconds per epoch, examples per second"
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
        table.add_column("trainer", justify="right", no_wrap=True)
        for percent in PERCENTILES:
            table.add_column(f"p{percent}", justify="right", no_wrap=True)
            table.add_column("ex/s", justify="right", no_wrap=True)
        for trainer in range(self.plan.trainers):
            table.add_row(str(trainer), *self._cells(route, trainer))
        table.add_row("all", *self._cells(route, None), style="bold")
        return table

    def _cells(self, route: RouteName, trainer: int | None) -> list[str]:
        seconds, rates = self.seconds(route, trainer), self.rates(route, trainer)
        return [
            cell
            for percent in PERCENTILES
            for cell in (
                f"{percentile(seconds, percent):.4f}",
                f"{percentile(rates, 100 - percent):.0f}",
            )
        ]

    def ratios(self) -> list[str]:
        """Say how routes compare with the first one, cycle by cycle."""
        base, *others = self.plan.routes
        sentences = []
        for route in others:
            middle, low, high = self.ratio(route, base)
            sentences.append(
                f"{route.value}: {middle:.2f} x the examples/s of {base.value} "
                f"(quartiles {low:.2f} and {high:.2f} over {self.plan.cycles} cycles)"
            )
        return sentences


def machine_facts() -> dict[str, str]:
    """Return versions and what the machine has."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return {
        "paceline": _version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": str(os.cpu_count()),
        "load": load,
    }


def _version() -> str:
    try:
        return importlib.metadata.version("paceline")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return "not installed"


def write_json(path: Path, report: Report) -> None:
    """Write every epoch, and what the table says of them."""
    plan = report.plan
    routes: dict[str, Any] = {}
    for route in plan.routes:
        everybody: list[int | None] = [*range(plan.trainers), None]
        routes[route.value] = {
            "percentiles": {
                "all" if trainer is None else str(trainer): _percentiles(report, route, trainer)
                for trainer in everybody
            },
            "epochs": [
                [asdict(sample) for sample in result.samples[route.value]]
                for result in report.results
            ],
            "ratio_to_first": report.ratio(route, plan.routes[0])[0],
        }
    document = {"machine": machine_facts(), "plan": asdict(plan), "routes": routes}
    path.write_text(json.dumps(document, indent=2) + "\n")


def _percentiles(report: Report, route: RouteName, trainer: int | None) -> dict[str, Any]:
    seconds, rates = report.seconds(route, trainer), report.rates(route, trainer)
    return {
        f"p{percent}": {
            "seconds": percentile(seconds, percent),
            "examples_per_s": percentile(rates, 100 - percent),
        }
        for percent in PERCENTILES
    }


def draw(path: Path, report: Report) -> None:
    """Draw the examples per second of all trainers, cycle by cycle."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for route in report.plan.routes:
        axes.plot(report.rates(route, None), marker=".", label=route.value)
    axes.set(xlabel="cycle", ylabel="examples per second, all trainers")
    axes.set_ylim(bottom=0)
    axes.set_title(f"{report.plan.trainers} trainers, {report.plan.servers} servers")
    axes.grid(True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
