"""Two runs side by side: what became faster or slower, and whether that is more than noise.

Steps of one run are not independent (a busy minute slows many), so the noise is estimated from
medians of blocks of steps: the interval of a difference is that of 2,000 resamplings of blocks.
Called by ``cli/report.py``. Must not know about HTML.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.report.analysis import Measured
from paceline.report.buckets import reductions_of
from paceline.report.numbers import median, percentile
from paceline.report.phases import NS_PER_MS, Phase
from paceline.report.steps import JobStep

BLOCKS = 30
RESAMPLES = 2000
# Fewer blocks say nothing of noise.
MIN_BLOCKS = 5
# Differences below these are not worth a word, however certain they are.
MIN_RATIO = 0.01
MIN_MS = 0.01
SEVERAL = 2.0  # from this ratio on it is told as times, not as percent
SHOWN_PHASES = (Phase.INPUT, Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.OPTIMIZER)


class ChangeVerdict(enum.Enum):
    """What a difference means."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "no difference beyond noise"
    UNSURE = "too few steps to tell"


@dataclass(frozen=True)
class Change:
    """One quantity in both runs: medians in ms, and the 95 % interval of their difference."""

    name: str
    before_ms: float
    after_ms: float
    low_ms: float
    high_ms: float
    verdict: ChangeVerdict

    @property
    def ratio(self) -> float:
        """After by before; 0 if there was nothing before."""
        return self.after_ms / self.before_ms if self.before_ms else 0.0


@dataclass(frozen=True)
class RunComparison:
    """Two runs. ``changes[0]`` is the step time."""

    before: str
    after: str
    before_steps: int
    after_steps: int
    changes: tuple[Change, ...]


def compare(before: Measured, after: Measured) -> RunComparison:
    """Compare a run with an earlier one."""
    old, new = series_of(before.steps), series_of(after.steps)
    names = [*old, *(name for name in new if name not in old)]
    return RunComparison(
        before=before.analysis.name,
        after=after.analysis.name,
        before_steps=len(before.steps),
        after_steps=len(after.steps),
        changes=tuple(judge(name, old.get(name, []), new.get(name, [])) for name in names),
    )


def series_of(steps: Sequence[JobStep]) -> dict[str, list[float]]:
    """Return every compared quantity, step by step, in ms; the mean over ranks."""
    found: dict[str, list[float]] = {"step": [step.duration_ns / NS_PER_MS for step in steps]}
    for phase in SHOWN_PHASES:
        found[phase.value] = [
            _mean([each.own_ns[phase] for each in step.ranks.values()]) for step in steps
        ]
    found["waiting for ranks"] = [
        _mean([each.lost_ns for each in step.ranks.values()]) for step in steps
    ]
    found["exposed communication"] = [
        _mean([each.exposed_ns for each in step.ranks.values()]) for step in steps
    ]
    for step in steps:
        rank = min(step.ranks)
        for reduction in reductions_of(step, rank):
            name = f"reduction of bucket {reduction.times.index}"
            name += f" (wrapper {step.key[0]})" if step.key[0] else ""
            found.setdefault(name, []).append(reduction.busy_ns / NS_PER_MS)
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) / NS_PER_MS


def judge(name: str, before: Sequence[float], after: Sequence[float]) -> Change:
    """Say whether a quantity differs by more than noise."""
    old, new = median(before), median(after)
    low, high = _interval(_blocks(before), _blocks(after))
    verdict = _verdict(before, after, low, high, old)
    return Change(name, round(old, 4), round(new, 4), round(low, 4), round(high, 4), verdict)


def _blocks(values: Sequence[float]) -> list[float]:
    """Medians of up to 30 blocks of neighbouring steps."""
    count = min(BLOCKS, len(values) // 2)
    edges = [len(values) * at // max(1, count) for at in range(count + 1)]
    return [median(values[edges[at] : edges[at + 1]]) for at in range(count)]


def _interval(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    if min(len(before), len(after)) < MIN_BLOCKS:
        return 0.0, 0.0
    chance = random.Random(0)  # the same answer every time
    differences = [
        median(chance.choices(after, k=len(after))) - median(chance.choices(before, k=len(before)))
        for _ in range(RESAMPLES)
    ]
    return percentile(differences, 2.5), percentile(differences, 97.5)


def _verdict(
    before: Sequence[float], after: Sequence[float], low: float, high: float, old: float
) -> ChangeVerdict:
    if min(len(_blocks(before)), len(_blocks(after))) < MIN_BLOCKS:
        return ChangeVerdict.UNSURE
    least = max(MIN_MS, MIN_RATIO * old)
    if low > 0 and high > least:
        return ChangeVerdict.SLOWER
    if high < 0 and low < -least:
        return ChangeVerdict.FASTER
    return ChangeVerdict.SAME


def headline(comparison: RunComparison) -> str:
    """Say in one sentence what changed."""
    step = comparison.changes[0]
    if step.verdict is ChangeVerdict.UNSURE:
        return "Too few steps to tell the runs apart."
    if step.verdict is ChangeVerdict.SAME:
        return "Steps take as long as before: the difference is within the noise."
    parts = [each for each in comparison.changes[1:8] if each.verdict is step.verdict]
    most = max(parts, key=lambda each: abs(each.after_ms - each.before_ms), default=None)
    word = "less" if step.verdict is ChangeVerdict.FASTER else "more"
    text = f"A step takes {abs(1 - step.ratio):.0%} {word} time".replace("%", " %")
    if step.ratio >= SEVERAL:
        text = f"A step takes {step.ratio:.3g} times as long"
    return f"{text}, most of it in {most.name}." if most else f"{text}."
