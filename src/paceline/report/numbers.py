"""Small statistics over lists of numbers. Pure; used by every part of the analysis."""

from __future__ import annotations

from collections.abc import Sequence


def median(values: Sequence[float]) -> float:
    """The middle; of an even number, the mean of both. 0 of nothing."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return float(ordered[middle])
    return (ordered[middle - 1] + ordered[middle]) / 2


def low_median(values: Sequence[int]) -> int:
    """The middle; of an even number, the lower: with two ranks, the faster one is the reference."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2] if ordered else 0


def percentile(values: Sequence[float], percent: float) -> float:
    """By linear interpolation, as ``numpy.percentile``. 0 of nothing."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return float(ordered[below] + (ordered[above] - ordered[below]) * (place - below))


def share(part: float, whole: float) -> float:
    """A part of a whole, 0 to 1; 0 of nothing."""
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0
