"""Lays a rank's parts out as a bucket is, for their exchange: piece by piece, from left to right.

Made by ``ddp/reduce/shard_sums.py`` for each bucket. A piece lies in memory that is used again and
again, and gradients are let go of as soon as they have been laid out: no further set of them builds
up, however large a bucket is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.buckets import Bucket, ParameterSpec
from paceline.shards.sums import Gradients
from paceline.shards.tree import Shares
from paceline.shards.tree_sum import scratch


class LaidOutParts:
    """This rank's parts of one bucket.

    Args:
        shares: Whose memory is used.
        bucket: How gradients lie in it.
        last: The rightmost part, which is laid out already.
        take: Takes what the others have of this bucket, from left to right.
    """

    def __init__(
        self,
        shares: Shares,
        bucket: Bucket,
        last: torch.Tensor,
        take: Callable[[], list[Gradients]],
    ) -> None:
        self._shares = shares
        self._specs = [slot.spec for slot in bucket.slots]
        self._offsets = bucket.spec.offsets
        self._last = last
        self._take = take
        self._others: list[Gradients] | None = None
        self._first = 0  # of the gradients that are not laid out to their end

    def __call__(self, begin: int, end: int) -> list[torch.Tensor]:
        """Return each part's elements from ``begin`` to ``end``; good until the next call."""
        if self._others is None:
            self._others = self._take()
        flats = []
        for number, values in enumerate(self._others):
            flat = scratch(self._shares, f"part {number}", end - begin, self._last)
            self._lay_out(values, flat, begin, end)
            flats.append(flat)
        self._let_go(end)
        return [*flats, self._last[begin:end]]

    def _lay_out(self, values: Gradients, flat: torch.Tensor, begin: int, end: int) -> None:
        """Copy what lies in the range; nothing is in the rest, nor in the bucket's trailer."""
        flat.zero_()
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for index in range(self._first, len(values)):
            spec, at, value = self._specs[index], self._offsets[index], values[index]
            if at >= end:
                break
            if value is None:
                continue
            if at >= begin and at + spec.numel <= end:
                targets.append(flat.as_strided(spec.shape, spec.stride, at - begin))
                sources.append(value)
                continue
            line = values[index] = _as_line(value, spec)
            start, stop = max(at, begin), min(at + spec.numel, end)
            targets.append(flat[start - begin : stop - begin])
            sources.append(line[start - at : stop - at])
        if targets:
            torch._foreach_copy_(targets, sources)

    def _let_go(self, end: int) -> None:
        assert self._others is not None
        places = list(zip(self._offsets, self._specs, strict=True))
        while self._first < len(places):
            at, spec = places[self._first]
            if at + spec.numel > end:
                return
            for values in self._others:
                values[self._first] = None
            self._first += 1


def _as_line(value: torch.Tensor, spec: ParameterSpec) -> torch.Tensor:
    """Return the elements in the order in which they lie in a bucket; a line stays what it is."""
    if value.shape != spec.shape:
        return value
    if value.stride() != spec.stride:
        laid_out = torch.empty_strided(
            spec.shape, spec.stride, dtype=value.dtype, device=value.device
        )
        value = laid_out.copy_(value)
    return value.as_strided((spec.numel,), (1,))
