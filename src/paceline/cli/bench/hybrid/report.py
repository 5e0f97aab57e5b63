"""What ``paceline bench hybrid`` makes of its numbers: machine facts, tables, a comparison, JSON.

Called by :mod:`paceline.cli.bench.hybrid` in the process of the command. Measures nothing.

Words: the *rate* of an epoch is its examples over its seconds. The rate of *all* trainers in a
cycle is all their examples over the seconds of the slowest of them. 'ex/s' beside pN is the rate
that all but (100 - N) % of the epochs reach, so both columns of pN speak of slow epochs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from paceline.cli.bench.harness.comparison import Comparison
from paceline.cli.bench.harness.report import machine_facts
from paceline.cli.bench.hybrid.plan import BATCHES, HybridPlan, RouteName
from paceline.cli.bench.hybrid.ranks import TrainerResult

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

    def comparison(self) -> Comparison:
        """Compare the time of an epoch, cycle by cycle, the slowest trainer of each.

        The two epochs of a cycle ran within seconds of each other if both routes go over RPC, and
        within one launch otherwise.
        """
        times = {
            route.value: [[1e3 * s] for s in self.seconds(route, None)]
            for route in self.plan.routes
        }
        return Comparison(self.title, self.plan.base, times)

    @property
    def title(self) -> str:
        """What was measured, in a few words."""
        return f"{self.plan.trainers} trainers, {self.plan.servers} servers"

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

    def to_json(self) -> dict[str, Any]:
        """Every epoch, and what the tables say of them."""
        plan = self.plan
        everybody: list[int | None] = [*range(plan.trainers), None]
        routes = {
            route.value: {
                "percentiles": {
                    "all" if trainer is None else str(trainer): _percentiles(self, route, trainer)
                    for trainer in everybody
                },
                "epochs": [[asdict(s) for s in r.samples[route.value]] for r in self.results],
            }
            for route in plan.routes
        }
        return {"plan": asdict(plan), "routes": routes, "comparison": self.comparison().to_json()}


def _percentiles(report: Report, route: RouteName, trainer: int | None) -> dict[str, Any]:
    seconds, rates = report.seconds(route, trainer), report.rates(route, trainer)
    return {
        f"p{percent}": {
            "seconds": percentile(seconds, percent),
            "examples_per_s": percentile(rates, 100 - percent),
        }
        for percent in PERCENTILES
    }
