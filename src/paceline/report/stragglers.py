"""Stragglers: how much the others lost by each rank, in which phase, how regularly.

Works on what steps.py measured; causes.py adds the likely cause. Must not know about HTML.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.report.numbers import median, share
from paceline.report.phases import NS_PER_MS, PHASES, Phase, to_ms
from paceline.report.steps import JobStep, RankStep

LISTED_STALLS = 20
MIN_STALL_NS = 10 * NS_PER_MS
# Below this share of the others' time nobody is called a straggler.
MIN_SHARE = 0.02
# Of N ranks that are all alike each is blamed for 1/N; a straggler for clearly more.
MIN_BLAME_OF_FAIR_SHARE = 1.25


class Pattern(enum.Enum):
    """How regularly a rank makes the others wait."""

    NEVER = "never"
    CHRONIC = "chronic"
    """Half of the loss is spread over at least a tenth of all steps."""
    PERIODIC = "periodic"
    """In few steps, at equal distances: a checkpoint, an evaluation."""
    OCCASIONAL = "occasional"
    """In few steps, at no fixed distance."""
    ONE_OFF = "one-off"
    """In one or two steps (of many)."""


@dataclass(frozen=True)
class Stall:
    """One step in which one rank made the others wait for longer than a step usually takes."""

    rank: int
    wrapper: int
    step: int
    late_ms: float
    phase: Phase


@dataclass(frozen=True)
class Straggler:
    """What one rank cost the others.

    Attributes:
        rank: The rank.
        lost_ms: How long others waited for it, added up over ranks and steps.
        per_step_ms: How long each of the others waited for it, in the mean step.
        share: The share of the others' time that is.
        last_share: The share of steps in which it arrived last.
        by_phase_ms: The same milliseconds as ``lost_ms``, by phase.
        phase: Where most of them come from.
        pattern: How regularly.
        period_steps: The distance of its stalls, if the pattern is periodic; else 0.
        from_step: The first step from which on it cost anything worth mentioning.
        to_step: The last.
        worst_step: The step in which it cost most.
        is_significant: It costs enough, and more (or more regularly) than chance would explain.
    """

    rank: int
    lost_ms: float
    per_step_ms: float
    share: float
    last_share: float
    by_phase_ms: dict[Phase, float]
    phase: Phase
    pattern: Pattern
    period_steps: int
    from_step: int
    to_step: int
    worst_step: int
    is_significant: bool


def find_stragglers(steps: Sequence[JobStep]) -> tuple[Straggler, ...]:
    """Return one entry for every rank, the most expensive first."""
    ranks = sorted({rank for step in steps for rank in step.ranks})
    total = sum(each.blame_ns for step in steps for each in step.ranks.values())
    found = [_straggler(rank, steps, total) for rank in ranks]
    return tuple(sorted(found, key=lambda each: (-each.lost_ms, each.rank)))


def _straggler(rank: int, steps: Sequence[JobStep], total_ns: float) -> Straggler:
    mine = [step for step in steps if rank in step.ranks and len(step.ranks) > 1]
    blames = [step.ranks[rank].blame_ns for step in mine]
    lost = sum(blames)
    others_ns = sum(step.duration_ns * (len(step.ranks) - 1) for step in mine)
    others = sum(len(step.ranks) - 1 for step in mine)
    by_phase = {
        phase: sum(step.ranks[rank].blame_by_phase_ns[phase] for step in mine) for phase in PHASES
    }
    pattern, period = find_pattern([step.number for step in mine], blames)
    first, last = _range(mine, blames)
    fair = MIN_BLAME_OF_FAIR_SHARE / max(2, len(mine[-1].ranks) if mine else 2)
    return Straggler(
        rank=rank,
        lost_ms=to_ms(lost),
        per_step_ms=to_ms(lost / others) if others else 0.0,
        share=share(lost, others_ns),
        last_share=share(sum(_is_last(rank, step) for step in mine), len(mine)),
        by_phase_ms={phase: to_ms(value) for phase, value in by_phase.items()},
        phase=max(PHASES, key=lambda phase: by_phase[phase]),
        pattern=pattern,
        period_steps=period,
        from_step=first,
        to_step=last,
        worst_step=max(mine, key=lambda step: step.ranks[rank].blame_ns).number if mine else 0,
        is_significant=share(lost, others_ns) >= MIN_SHARE
        and (share(lost, total_ns) >= fair or pattern is Pattern.PERIODIC),
    )


def _is_last(rank: int, step: JobStep) -> bool:
    return step.ranks[rank].arrived_ns == max(each.arrived_ns for each in step.ranks.values())


def find_pattern(numbers: Sequence[int], blames: Sequence[float]) -> tuple[Pattern, int]:
    """Say how regularly a rank is blamed, and the distance in steps if it is periodic."""
    costly = _steps_of_half(blames)
    if not costly:
        return Pattern.NEVER, 0
    if len(costly) >= max(3, len(blames) / 10):
        return Pattern.CHRONIC, 0
    at_steps = [numbers[at] for at in costly_steps(blames)]
    gaps = [late - early for early, late in itertools.pairwise(at_steps)]
    usual = round(median(gaps))
    regular = sum(abs(gap - usual) <= usual / 50 for gap in gaps)
    if len(gaps) >= 3 and usual > 1 and regular >= 0.8 * len(gaps):
        return Pattern.PERIODIC, usual
    return (Pattern.ONE_OFF if len(at_steps) <= 2 else Pattern.OCCASIONAL), 0


def costly_steps(blames: Sequence[float]) -> list[int]:
    """Indices of the steps that make a pattern that is not chronic: those like the worst ones."""
    costly = _steps_of_half(blames)
    least = min((blames[at] for at in costly), default=0.0) / 2
    return [at for at, blame in enumerate(blames) if blame and blame >= least]


def _steps_of_half(blames: Sequence[float]) -> list[int]:
    """Indices of the fewest steps that hold half of the loss."""
    order = sorted(range(len(blames)), key=lambda at: -blames[at])
    half, found = sum(blames) / 2, 0.0
    costly: list[int] = []
    for at in order:
        if found >= half or not blames[at]:
            break
        costly.append(at)
        found += blames[at]
    return costly


def _range(steps: Sequence[JobStep], blames: Sequence[float]) -> tuple[int, int]:
    """The steps between which nearly all (98 %) of the loss lies."""
    total, found = sum(blames), 0.0
    first = last = 0
    for step, blame in zip(steps, blames, strict=True):
        found += blame
        if not first and total and found >= total / 100:
            first = step.number
        if total and found - blame < total * 0.99:
            last = step.number
    return first, last


def find_stalls(steps: Sequence[JobStep]) -> tuple[Stall, ...]:
    """Return the longest waits for a single rank, longest first."""
    usual = median([step.duration_ns for step in steps])
    threshold = max(usual, MIN_STALL_NS)
    found = [
        Stall(rank, *step.key, late_ms=to_ms(each.late_ns), phase=worst_phase(each))
        for step in steps
        for rank, each in step.ranks.items()
        if each.late_ns >= threshold and each.blame_ns
    ]
    return tuple(sorted(found, key=lambda stall: (-stall.late_ms, stall.rank))[:LISTED_STALLS])


def worst_phase(each: RankStep) -> Phase:
    """The phase that a rank is blamed for most in a step."""
    return max(PHASES, key=lambda phase: each.blame_by_phase_ns[phase])
