"""Medians, ratios of interleaved measurements, and how sure one can be of them. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median

RESAMPLES = 2000


@dataclass(frozen=True)
class Estimate:
    """A ratio or difference of two variants: the median over rounds, and its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def p50(blocks: Sequence[Sequence[float]]) -> float:
    """Return the median over all steps of all rounds."""
    return median(chain.from_iterable(blocks))


def ratio(mine: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> Estimate:
    """Compare two variants round by round."""
    per_round = [median(a) / median(b) for a, b in zip(mine, theirs, strict=True)]
    low, high = bootstrap_interval(per_round)
    return Estimate(median(per_round), low, high)


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median, by drawing the rounds again with replacement."""
    draw = random.Random(0)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]
