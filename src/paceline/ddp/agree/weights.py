"""The weighted mean: sum of n_r g_r over sum of n_r.

The first sum is what the reduction computes, once gradients are multiplied with n_r on their way
in. The n_r themselves come with the control block, so the division is the last thing that happens
to a step.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch

from paceline.buckets import Bucket
from paceline.ddp.agree.control import ControlBlock
from paceline.ddp.agree.nonfinite import bucket_is_finite
from paceline.errors import ConfigurationError


class WeightedMean:
    """Remembers the scale of the weights from step to step.

    Gradients are multiplied with n_r / unit. The unit is the power of two next to the mean weight
    of the previous weighted step, the same on all ranks: it keeps float16 in range and, being a
    power of two, changes no bit of the result otherwise.

    Attributes:
        unit: See above.
    """

    def __init__(self) -> None:
        self.unit = 1.0

    def factor(self, weight: float) -> float:
        """What this rank's gradients are multiplied with."""
        return weight / self.unit

    def finish(self, buckets: Sequence[Bucket], block: ControlBlock, *, multiplier: float) -> None:
        """Divide by the sum of weights. With no weight at all, gradients are zero.

        Args:
            buckets: The reduced buckets; none on a rank that has joined and only keeps up.
            block: Where the weights of all ranks are.
            multiplier: The world size if a hook has divided by it already, else 1.
        """
        weights = [row.weight for _, row in block.present()]
        total = sum(weights)
        before = self.unit
        if total > 0.0:
            self.unit = _power_of_two(total / len(weights))
        for bucket in buckets:
            if self.unit > before and bucket.spec.dtype is torch.float16:
                _warn_of_overflow(bucket, weights)
            bucket.scale(before * multiplier / total if total > 0.0 else 0.0)


def _warn_of_overflow(bucket: Bucket, weights: Sequence[float]) -> None:
    if not bucket_is_finite(bucket):
        warnings.warn(
            f"weighted(n): the weights of this step, {list(weights)} by rank, are so much larger "
            "than those before that float16 gradients times weights overflowed. The next step "
            "knows the scale. To avoid this, divide the weights by one constant on every rank, "
            "for example weighted(tokens / 4096): only their ratios matter.",
            RuntimeWarning,
            stacklevel=2,
        )


def check_weight(n: Any, rank: int) -> float:
    """Return a weight as a float; numbers, NumPy's and tensors of one element are taken.

    Raises:
        ConfigurationError: If it is no finite number, or negative.
    """
    is_number = isinstance(n, Real) or (isinstance(n, torch.Tensor) and n.numel() == 1)
    weight = float(n) if is_number else math.nan
    if not 0.0 <= weight < math.inf:
        raise ConfigurationError(
            f"weighted({n!r}) on rank {rank}: a weight is a finite number that is not negative, "
            "usually the number of samples or tokens in the batch."
        )
    return weight


def _power_of_two(value: float) -> float:
    """Return the smallest power of two that is not below ``value``; at least 1."""
    power = 1.0
    while power < value:
        power *= 2.0
    return power
