"""The thin matrices of one bucket: where each P and Q lies, and which gradients go without.

Used by :mod:`paceline.hooks.powersgd`. All P of a bucket, followed by the gradients that are not
compressed, are one message; all Q are the other. Knows layouts; must not know groups or steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch

from paceline.hooks import lowrank
from paceline.hooks.layout import BucketView, Numbers


@dataclass(frozen=True)
class Matrix:
    """One gradient that is compressed.

    Attributes:
        number: Of its parameter; negative for a whole bucket, which no single parameter owns.
        offset: Where it begins in the bucket.
        rows, columns: Its shape.
    """

    number: int
    offset: int
    rows: int
    columns: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Cut this matrix out of a bucket."""
        end = self.offset + self.rows * self.columns
        return flat[self.offset : end].view(self.rows, self.columns)


class Factors:
    """P and Q of a bucket.

    Args:
        view: The bucket.
        batches: Matrices to compress; those of one batch have one shape.
        rest: (offset, size) of what is not compressed.
        rank: At most so many columns.
        numel: How long the values are that are cut; more than the bucket if padded.
    """

    def __init__(
        self,
        view: BucketView,
        batches: list[list[Matrix]],
        rest: list[tuple[int, int]],
        rank: int,
        numel: int,
    ) -> None:
        self.numbers: Numbers = view.numbers
        self.numel = numel
        self._batches = batches
        self._rest = rest
        ranks = [min(b[0].rows, b[0].columns, rank) for b in batches]
        p_shapes = [(len(b), b[0].rows, r) for b, r in zip(batches, ranks, strict=True)]
        q_shapes = [(len(b), b[0].columns, r) for b, r in zip(batches, ranks, strict=True)]
        p_numel = sum(map(math.prod, p_shapes))
        rest_numel = sum(size for _, size in rest)
        dtype, values = view.compute_dtype, view.values
        self.message = values.new_zeros(p_numel + rest_numel, dtype=dtype)
        self.q_flat = values.new_zeros(sum(map(math.prod, q_shapes)), dtype=dtype)
        self.ps = _cut(self.message, p_shapes)
        self.qs = _cut(self.q_flat, q_shapes)

    @property
    def p_flat(self) -> torch.Tensor:
        """All P."""
        return self.message[: self.message.numel() - self.rest_flat.numel()]

    @property
    def rest_flat(self) -> torch.Tensor:
        """What is not compressed."""
        size = sum(size for _, size in self._rest)
        return self.message[self.message.numel() - size :]

    @property
    def sent_numel(self) -> int:
        """How many values stand for the bucket."""
        return self.message.numel() + self.q_flat.numel()

    def cut(self, source: torch.Tensor, world: int) -> list[torch.Tensor]:
        """Return the batches of matrices in ``source``, and put the rest into the message.

        The rest as this rank's share of the mean: the sum of 16-bit numbers may be out of range.
        """
        if self._rest:
            parts = [source[offset : offset + size] for offset, size in self._rest]
            torch.div(torch.cat(parts), world, out=self.rest_flat)
        return [
            batch[0].of(source).unsqueeze(0)
            if len(batch) == 1
            else torch.stack([matrix.of(source) for matrix in batch])
            for batch in self._batches
        ]

    def write(self, out: torch.Tensor) -> None:
        """Write P Q^T and the rest into ``out``."""
        for batch, p, q in zip(self._batches, self.ps, self.qs, strict=True):
            if len(batch) == 1:
                lowrank.multiply(p, q, batch[0].of(out).unsqueeze(0))
                continue
            product = p.new_empty(len(batch), batch[0].rows, batch[0].columns)
            lowrank.multiply(p, q, product)
            for matrix, values in zip(batch, product, strict=True):
                matrix.of(out).copy_(values)
        ends = accumulate(size for _, size in self._rest)
        for (offset, size), end in zip(self._rest, ends, strict=True):
            out[offset : offset + size].copy_(self.rest_flat[end - size : end])

    def keep_error(self, source: torch.Tensor, result: torch.Tensor) -> None:
        """Leave in ``source`` what ``result`` lacks; nothing where there was no loss or no number.

        The rest was averaged exactly, so nothing of it is missing.
        """
        for batch, q in zip(self._batches, self.qs, strict=True):
            finite = bool(torch.isfinite(q).all())
            for matrix in batch:
                error = matrix.of(source)
                error.sub_(matrix.of(result)) if finite else error.zero_()
        for offset, size in self._rest:
            source[offset : offset + size].zero_()

    def q_by_number(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Every Q that belongs to one parameter, with its number."""
        for batch, q in zip(self._batches, self.qs, strict=True):
            for matrix, one in zip(batch, q, strict=True):
                yield matrix.number, one

    def take_qs(self, loose: dict[int, torch.Tensor]) -> bool:
        """Take over Qs from before; False if some are missing or of another shape."""
        mine = dict(self.q_by_number())
        fits = all(n in loose and loose[n].shape == q.shape for n, q in mine.items())
        if not mine or not fits:
            return False
        for number, q in mine.items():
            q.copy_(loose.pop(number))
        return True

    def randomise_qs(self, generator: torch.Generator) -> None:
        """Draw every Q, the same on all ranks for the same seed."""
        for q in self.qs:
            q.copy_(torch.randn(q.shape, generator=generator, dtype=q.dtype))


def plan_matrices(view: BucketView, rank: int, min_rate: float, *, batched: bool) -> Factors:
    """Plan one matrix per parameter; small ones and vectors go without compression."""
    by_shape: dict[tuple[int, int], list[Matrix]] = {}
    rest: list[tuple[int, int]] = []
    offset = 0
    for number, (rows, columns) in zip(view.numbers, view.shapes, strict=True):
        r = min(rows, columns, rank)
        if (rows + columns) * r * min_rate < rows * columns:
            matrix = Matrix(number, offset, rows, columns)
            by_shape.setdefault((rows, columns), []).append(matrix)
        else:
            rest.append((offset, rows * columns))
        offset += rows * columns
    groups = list(by_shape.values())
    batches = groups if batched else [[matrix] for group in groups for matrix in group]
    return Factors(view, batches, rest, rank, view.numel)


def plan_square(view: BucketView, rank: int) -> Factors:
    """Plan the whole bucket as one square matrix, padded with zeros."""
    side = math.isqrt(max(0, view.numel - 1)) + 1
    # A negative number of its own for each bucket: its Q cannot move to another cut.
    whole = Matrix(-1 - view.index, 0, side, side)
    return Factors(view, [[whole]], [], rank, side * side)


def _cut(flat: torch.Tensor, shapes: list[tuple[int, int, int]]) -> list[torch.Tensor]:
    ends = accumulate(math.prod(shape) for shape in shapes)
    return [
        flat[end - math.prod(shape) : end].view(shape)
        for shape, end in zip(shapes, ends, strict=True)
    ]
