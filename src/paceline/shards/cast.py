"""Sums in float16 or bfloat16: half the traffic, and the same bits at any number of ranks.

What a hook that casts does to the gradients of a rank is done here to those of every shard: they
are divided by the number of shards, cast, and every addition along the tree is in the small dtype.
Called by the sums of a rank's shards.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.shards.sums import Gradients
from paceline.types import Reduction


def cast_all(gradients: Gradients, dtype: torch.dtype, factor: float) -> Gradients:
    """Multiply, then cast."""
    return [None if each is None else each.mul_(factor).to(dtype) for each in gradients]


def cast_flat(flat: torch.Tensor, numel: int, dtype: torch.dtype, factor: float) -> torch.Tensor:
    """The same for a bucket: what is behind its gradients is exact in every dtype."""
    small = flat.to(dtype)
    small[:numel] = flat[:numel] * factor
    return small


class CastSum:
    """A sum in a small dtype; at its end the bucket gets it back."""

    __slots__ = ("_flat", "_inner", "_small")

    def __init__(self, inner: Reduction, small: torch.Tensor, flat: torch.Tensor) -> None:
        self._inner = inner
        self._small: torch.Tensor | None = small
        self._flat = flat

    def wait(self) -> None:
        """Wait for the sum, then cast it back."""
        self._inner.wait()
        small, self._small = self._small, None
        if small is not None:
            self._flat.copy_(small)

    def is_done(self) -> bool:
        """Not before somebody has waited."""
        return self._small is None

    def on_done(self, callback: Callable[[int], None]) -> None:
        """Tell when the sum was there."""
        self._inner.on_done(callback)
