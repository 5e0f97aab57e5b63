"""How values are written on the wire: blocks of int8, of fp8, or of single bits, each with a scale.

Called by :mod:`paceline.hooks.quantized`. A codec turns rows of numbers into rows of bytes and
back. Knows nothing about groups, buckets or what the numbers mean. Values are float32 or float64; a
row is a whole number of blocks. Every block has one scale, in the dtype of the values:

    | codes of all blocks | padding to 8 bytes | scales |

A block that holds NaN or infinity has a scale that is not finite, and is read as NaN throughout: so
every rank learns of it, as with a plain all-reduce.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Iterator
from typing import ClassVar

import torch

_CHUNK = 1 << 19  # values that are worked on at once: what stays in the cache is written once
Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Blocks x values, with their code bytes and scales."""


class Codec(abc.ABC):
    """Rows of values to rows of bytes.

    Args:
        block: How many values share a scale; a multiple of 8.
    """

    def __init__(self, block: int) -> None:
        self.block = block

    @abc.abstractmethod
    def code_bytes(self, numel: int) -> int:
        """How many bytes the codes of so many values take."""

    @abc.abstractmethod
    def write(self, part: Part, work: torch.Tensor, noise: torch.Generator | None) -> None:
        """Encode blocks. ``work`` has their shape, and may be overwritten."""

    @abc.abstractmethod
    def read(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Decode blocks."""

    def row_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """How many bytes a row of so many values takes; a multiple of 8."""
        return _aligned(self._scales_at(numel) + numel // self.block * dtype.itemsize)

    def encode(
        self,
        values: torch.Tensor,
        wire: torch.Tensor,
        *,
        noise: torch.Generator | None = None,
        add: torch.Tensor | None = None,
        keep_error: bool = False,
    ) -> None:
        """Write rows of values into rows of bytes.

        Everything that is done to the values is done here, part by part, while they are in the
        cache.

        Args:
            values: The rows.
            wire: As many rows of bytes.
            noise: For codecs that round by chance.
            add: Added to the values before; flat, and perhaps shorter than they are.
            keep_error: Leave in ``values`` what the bytes do not say of them.
        """
        offset = 0
        for part, work in self._parts(values, wire):
            flat = part[0].view(-1)
            if add is not None:
                addend = add[offset : offset + flat.numel()]
                flat[: addend.numel()].add_(addend)
                offset += flat.numel()
            self.write(part, work, noise)
            if keep_error:
                self._subtract(part, work)

    def decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        """Read rows of bytes into ``out``, a matrix."""
        for (values, codes, scales), _ in self._parts(out, wire):
            self.read(codes, scales, values)

    def decode_add_mean(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        """Read all rows of bytes and add their mean, row by row, to the vector ``out``.

        Each is divided first: the mean is in range, the sum may not be.
        """
        rows = [self._parts(out.unsqueeze(0), row.unsqueeze(0)) for row in wire]
        for same in zip(*rows, strict=True):
            for (values, codes, scales), work in same:
                self.read(codes, scales / len(wire), work)
                values.add_(work)

    def _subtract(self, part: Part, work: torch.Tensor) -> None:
        """Take what was written out of the values: what is left is the error of the codec.

        Nothing is left of blocks that are not finite: an error that is NaN would stay for ever.
        """
        values, codes, scales = part
        self.read(codes, scales, work)
        values.sub_(work)
        lost = ~torch.isfinite(scales)
        if lost.any():
            values[lost] = 0.0

    def _parts(
        self, values: torch.Tensor, wire: torch.Tensor
    ) -> Iterator[tuple[Part, torch.Tensor]]:
        """Cut rows of values and bytes into parts that fit the cache, each with a work space."""
        numel = values.shape[1]
        start = self._scales_at(numel)
        blocks = numel // self.block
        size = max(1, _CHUNK // self.block)
        work = torch.empty(min(size, blocks), self.block, dtype=values.dtype, device=values.device)
        for row, bytes_ in zip(values, wire, strict=True):
            codes = bytes_[: self.code_bytes(numel)].view(blocks, -1)
            scales = bytes_[start : start + blocks * row.element_size()].view(row.dtype)
            parts = (row.view(blocks, self.block), codes, scales)
            for part in zip(*(whole.split(size) for whole in parts), strict=True):
                yield part, work[: len(part[0])]

    def _scales_at(self, numel: int) -> int:
        return _aligned(self.code_bytes(numel))


class Int8Codec(Codec):
    """One byte for each value; the largest of a block is 127.

    The error of a value is at most half a step, which is 1/254 of its block's largest; with
    ``stochastic``, at most a step, and zero on average.
    """

    def __init__(self, block: int, *, stochastic: bool = False) -> None:
        super().__init__(block)
        self.stochastic = stochastic

    def code_bytes(self, numel: int) -> int:
        """One each."""
        return numel

    def write(self, part: Part, work: torch.Tensor, noise: torch.Generator | None) -> None:
        """Scale, round, cast."""
        values, codes, _ = part
        torch.mul(values, _factors(part, work, 127.0), out=work)
        if self.stochastic:
            chance = torch.rand(work.shape, generator=noise, dtype=work.dtype, device=work.device)
            work.add_(chance).floor_().clamp_(-127.0, 127.0)
        else:
            work.round_()
        codes.view(torch.int8).copy_(work)

    def read(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Cast, then scale: to multiply int8 with floats directly is 5 times slower."""
        out.copy_(codes.view(torch.int8)).mul_(scales.unsqueeze(1))


class Fp8Codec(Codec):
    """One byte for each value, as a floating-point number of 8 bits.

    ``e4m3`` has 3 bits of mantissa: a relative error of at most 1/16 for values down to 1/28672 of
    the block's largest. ``e5m2`` has 2: at most 1/8, down to 1/939524096.
    """

    FORMATS: ClassVar = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}

    def __init__(self, block: int, fmt: str) -> None:
        super().__init__(block)
        self.dtype = self.FORMATS[fmt]

    def code_bytes(self, numel: int) -> int:
        """One each."""
        return numel

    def write(self, part: Part, work: torch.Tensor, noise: torch.Generator | None) -> None:
        """Scale and cast."""
        values, codes, _ = part
        torch.mul(values, _factors(part, work, torch.finfo(self.dtype).max), out=work)
        codes.view(self.dtype).copy_(work)

    def read(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Cast and scale."""
        if self.dtype is torch.float8_e5m2:
            out.copy_(codes.view(self.dtype)).mul_(scales.unsqueeze(1))
        else:
            out.copy_(_half_of_e4m3(codes)).mul_(scales.unsqueeze(1) * 256.0)


class SignCodec(Codec):
    """One bit for each value: its sign, times the mean magnitude of its block."""

    def code_bytes(self, numel: int) -> int:
        """One for every eight."""
        return numel // 8

    def write(self, part: Part, work: torch.Tensor, noise: torch.Generator | None) -> None:
        """Take the mean magnitude, and pack the signs."""
        values, codes, scales = part
        # Divided first: the sum of a block may be out of range.
        torch.sum(torch.abs(values, out=work).div_(self.block), dim=1, out=scales)
        scales.masked_fill_(torch.isinf(scales), math.nan)
        words = values.ge(0).view(torch.int64)
        codes.copy_(words.mul_(_GATHER).bitwise_right_shift_(56).bitwise_and_(0xFF))

    def read(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Unpack 0 and 1, and make them minus and plus the magnitude."""
        words = codes.to(torch.int64).mul_(_REPEAT).bitwise_and_(_ONE_BIT_EACH)
        out.copy_(words.view(torch.uint8).ne(0)).mul_(2.0).sub_(1.0).mul_(scales.unsqueeze(1))


# Eight bytes that are 0 or 1, as one little-endian word: times _GATHER, byte i has moved to bit
# 56 + i, and no two of the products meet or carry. A byte times _REPEAT stands in all eight bytes,
# of which _ONE_BIT_EACH keeps bit i in byte i.
_GATHER = sum(1 << 7 * (8 - i) for i in range(8))
_REPEAT = sum(1 << 8 * i for i in range(8))
_ONE_BIT_EACH = sum(1 << 9 * i for i in range(8)) - (1 << 64)  # as a signed number


def _half_of_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """Read e4m3 as float16, smaller by 256: the bits are the same, at other places.

    Seven times faster than torch's cast. NaN is read as 480: a block with NaN has a scale that is
    none either.
    """
    wide = codes.to(torch.int16)
    sign = wide.bitwise_and(0x80).bitwise_left_shift_(8)
    return wide.bitwise_and_(0x7F).bitwise_left_shift_(7).bitwise_or_(sign).view(torch.float16)


def _factors(part: Part, work: torch.Tensor, largest: float) -> torch.Tensor:
    """Set scales so that each block's largest value becomes ``largest``; return the factors.

    The factor is 0 for blocks of zeros (or as good as zero), and for those with NaN or infinity,
    whose scale then is NaN.
    """
    values, _, scales = part
    torch.amax(torch.abs(values, out=work), dim=1, out=scales)
    scales.div_(largest).masked_fill_(torch.isinf(scales), math.nan)
    factors = scales.reciprocal()
    factors[~torch.isfinite(factors)] = 0.0
    return factors.unsqueeze(1)


def _aligned(count: int) -> int:
    return -(-count // 8) * 8
