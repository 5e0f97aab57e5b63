"""Medians, ratios of interleaved measurements, and how sure one can be of them. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median

RESAMPLES = 2000

Blocks = Sequence[Sequence[float]]
"""What one contender measured: by round, then by step."""


@dataclass(frozen=True)
class Estimate:
    """A median over rounds, and its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def p50(blocks: Blocks) -> float:
    """Return the median over all steps of all rounds."""
    return median(chain.from_iterable(blocks))


def estimate(per_round: Sequence[float]) -> Estimate:
    """Return the median of what was found in each round, with its interval."""
    return Estimate(median(per_round), *bootstrap_interval(per_round))


def ratio(mine: Blocks, theirs: Blocks) -> Estimate:
    """Compare two contenders round by round."""
    return estimate([median(a) / median(b) for a, b in zip(mine, theirs, strict=True)])


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median, by drawing the rounds again with replacement."""
    draw = random.Random(0)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]
