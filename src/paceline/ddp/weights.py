"""The weighted mean: sum of n_r g_r over sum of n_r.

The first sum is what the reduction computes, once gradients are multiplied with n_r on their way
in. The n_r themselves come with the control block, so the division is the last thing that happens
to a step.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.buckets import Bucket
from paceline.ddp.control import ControlBlock


class WeightedMean:
    """Remembers the scale of the weights from step to step.

    Gradients are multiplied with n_r / unit. The unit is the power of two next to the mean weight
    of the previous weighted step, the same on all ranks: it keeps float16 in range and, being a
    power of two, changes no bit of the result otherwise.
    """

    def __init__(self) -> None:
        self._unit = 1.0

    def factor(self, weight: float) -> float:
        """What this rank's gradients are multiplied with."""
        return weight / self._unit

    def finish(self, buckets: Iterable[Bucket], block: ControlBlock, *, multiplier: float) -> None:
        """Divide by the sum of weights. With no weight at all, gradients are zero.

        Args:
            buckets: The reduced buckets.
            block: Where the weights of all ranks are.
            multiplier: The world size if a hook has divided by it already, else 1.
        """
        weights = [row.weight for _, row in block.present()]
        total = sum(weights)
        factor = self._unit * multiplier / total if total > 0.0 else 0.0
        for bucket in buckets:
            bucket.scale(factor)
        if total > 0.0:
            self._unit = _power_of_two(total / len(weights))


def _power_of_two(value: float) -> float:
    """Return the smallest power of two that is not below ``value``; at least 1."""
    power = 1.0
    while power < value:
        power *= 2.0
    return power
