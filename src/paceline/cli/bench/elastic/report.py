"""What was found about kills: as a table, as JSON, and the speed over time as a plot."""

from __future__ import annotations

import argparse
import json
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.markup import escape
from rich.table import Table

from paceline.cli.bench.elastic.contenders import OURS, OURS_SPARE
from paceline.cli.bench.elastic.kills import MeasuredKill, StepNote, samples_per_s
from paceline.cli.bench.elastic.overhead import Overhead
from paceline.cli.bench.elastic.script import BATCH
from paceline.cli.bench.harness import plot, report

PHASES = ("heard", "noticed", "agreed", "rebuilt", "copied", "first step")
TARGETS = {OURS_SPARE: (0.5, 1.0, 2.0), OURS: (0.5, 1.0, 6.0)}
"""Of ours, in seconds: the next step, median and 95th percentile; the replacement's first step."""
BIN_S = 0.25
KILLED = "#cf222e"

Phases = dict[str, float]


@dataclass(frozen=True)
class Result:
    """What was found of one contender.

    Attributes:
        problem: Why there is not more; '' if all went well.
        phases: Of each kill, for Paceline.
    """

    contender: str
    kills: list[MeasuredKill]
    notes: list[StepNote]
    problem: str
    phases: list[Phases]

    def percentile(self, share: float) -> float:
        """Of the seconds until the next step."""
        values = sorted(kill.next_step_s for kill in self.kills)
        return values[min(len(values) - 1, int(share * len(values)))]


def read_phases(folder: Path, kills: Sequence[MeasuredKill]) -> list[Phases]:
    """Match the launcher's record of each change with the kill before it."""
    path = folder / "run" / "membership.jsonl"
    if not path.exists():
        return []
    events = [json.loads(line) for line in path.read_text().splitlines()]
    offset_s = time.time() - time.monotonic()
    found = []
    for kill in kills:
        after = [e for e in events if e["at_s"] - offset_s > kill.at_s]
        if not after:
            continue
        event = after[0]
        parts = {name: event[f"{name}_s"] for name in PHASES[1:5]}
        began_s = event["at_s"] - offset_s - kill.at_s
        heard = {"heard": max(0.0, began_s - sum(parts.values()))}
        first_step = max(0.0, kill.next_step_s - began_s)
        found.append({**heard, **parts, "first step": first_step})
    return found


def show(args: argparse.Namespace, results: Sequence[Result], costs: Sequence[Overhead]) -> bool:
    """Print, write and draw; say whether our targets are met."""
    console = report.console()
    console.print(_table(args, results))
    for result in results:
        if result.phases:
            text = ", ".join(
                f"{name} {median(p[name] for p in result.phases):.3f}" for name in PHASES
            )
            console.print(f"{result.contender}: median seconds until the next step: {text}")
        if result.problem:
            console.print(escape(f"{result.contender}: {result.problem}"))
    for cost in costs:
        console.print(escape(cost.describe()))
    missed = find_missed(results, costs)
    for text in missed:
        console.print(f"target missed: {escape(text)}")
    report.write_json(args.json, _to_json(results, costs))
    if args.plot is not None:
        draw(args.plot, results)
    return not missed


def _table(args: argparse.Namespace, results: Sequence[Result]) -> Table:
    made = Table(title=f"{args.ranks} ranks, SIGKILL of one at a time; seconds until")
    for heading in ("contender", "kills", "next step p50", "p95", "replacement's step p50",
                    "worst", "steps done again"):  # fmt: skip
        made.add_column(heading, justify="left" if heading == "contender" else "right")
    for each in results:
        if not each.kills:
            made.add_row(escape(each.contender), "0", "-", "-", "-", "-", "-")
            continue
        replaced = [kill.replaced_s for kill in each.kills]
        made.add_row(
            escape(each.contender),
            str(len(each.kills)),
            f"{each.percentile(0.5):.2f}",
            f"{each.percentile(0.95):.2f}",
            f"{median(replaced):.2f}",
            f"{max(replaced):.2f}",
            str(sum(kill.repeated for kill in each.kills)),
        )
    return made


def find_missed(results: Sequence[Result], costs: Sequence[Overhead]) -> list[str]:
    """Say which targets are missed."""
    missed = []
    for each in results:
        if each.contender not in TARGETS:
            continue
        p50, p95, replaced = TARGETS[each.contender]
        if each.problem or not each.kills:
            missed.append(f"{each.contender} did not go on")
            continue
        worst = max(kill.replaced_s for kill in each.kills)
        for what, value, most in (
            ("p50 of the next step", each.percentile(0.5), p50),
            ("p95 of the next step", each.percentile(0.95), p95),
            ("the replacement's first step", worst, replaced),
        ):
            if value > most:
                missed.append(f"{each.contender}: {what} is {value:.2f} s, not {most:g}")
    missed += [cost.describe() for cost in costs if not cost.is_met]
    return missed


def _to_json(results: Sequence[Result], costs: Sequence[Overhead]) -> dict[str, Any]:
    return {
        "contenders": [
            {
                "contender": each.contender,
                "problem": each.problem,
                "kills": [asdict(kill) for kill in each.kills],
                "phases": each.phases,
                "samples_per_s": samples_per_s(each.notes, BATCH, BIN_S),
            }
            for each in results
        ],
        "overhead": [asdict(cost) for cost in costs],
    }


def draw(path: Path, results: Sequence[Result]) -> None:
    """Samples a second over time, one panel below the other, with the kills."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (9, 0.8 + 1.6 * len(results))
    figure, grid = pyplot.subplots(
        len(results), 1, figsize=size, squeeze=False, sharex=True, sharey=True
    )
    ends_s = [draw_contender(panel, each) for panel, each in zip(grid.flat, results, strict=True)]
    grid.flat[0].set_xlim(0.0, max(ends_s) or 1.0)  # of all, as they share it
    grid.flat[0].set_ylim(bottom=0.0)
    grid.flat[-1].set_xlabel(
        "seconds since the first step; red: from a SIGKILL to the next step", fontsize=8
    )
    plot.save(figure, path, "Samples per second while ranks are killed")


def draw_contender(panel: Any, result: Result) -> float:
    """One contender's panel; if there is nothing to draw, why. Returns the seconds it shows."""
    panel.set_title(headline(result), fontsize=9, loc="left")
    panel.set_ylabel("samples/s", fontsize=8)
    panel.tick_params(labelsize=8)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    speeds = samples_per_s(result.notes, BATCH, BIN_S)
    if not speeds:
        return 0.0
    began_s = speeds[0][0]
    end_s = speeds[-1][0] + BIN_S - began_s
    speeds = [*speeds, (began_s + end_s, 0.0)]
    times = [at_s - began_s for at_s, _ in speeds]
    color = plot.WINNER if result.contender in TARGETS else plot.OTHER
    panel.fill_between(times, [speed for _, speed in speeds], step="post", color=color, alpha=0.8)
    for kill in result.kills:
        at_s = kill.at_s - began_s
        panel.axvspan(at_s, at_s + kill.next_step_s, color=KILLED, alpha=0.25, linewidth=0)
        panel.axvline(at_s, color=KILLED, linewidth=0.9)
        end_s = max(end_s, at_s + kill.next_step_s)
    return end_s


def headline(result: Result) -> str:
    """What a contender's panel shows, in words."""
    words = [result.contender]
    if result.kills:
        again = sum(kill.repeated for kill in result.kills)
        median_s = result.percentile(0.5)
        words.append(f"{len(result.kills)} kills, the next step after {median_s:.2f} s (median)")
        words += [f"{again} steps done again"] if again else []
    if result.problem:
        words.append(textwrap.shorten(result.problem, 90, placeholder=" …"))
    return "; ".join(words)
