"""Sums in float16 or bfloat16: half the traffic, and the same bits at any number of ranks.

What a hook that casts does to the gradients of a rank is done here to those of every shard: they
are divided by the number of shards, cast, and every addition along the tree is in the small dtype.
Called by the sums of a rank's shards.
"""

from __future__ import annotations

import torch

from paceline.shards.sums import Gradients


def cast_all(gradients: Gradients, dtype: torch.dtype, factor: float) -> Gradients:
    """Multiply, then cast."""
    return [None if each is None else each.mul_(factor).to(dtype) for each in gradients]


def cast_flat(flat: torch.Tensor, numel: int, dtype: torch.dtype, factor: float) -> torch.Tensor:
    """The same for a bucket: what is behind its gradients is exact in every dtype."""
    small = flat.to(dtype)
    small[:numel] = flat[:numel] * factor
    return small
