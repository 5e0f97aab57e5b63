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
from typing import ClassVar

import torch

_CHUNK = 1 << 19  # values that are worked on at once: what stays in the cache is written once


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
    def write(
        self,
        values: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        noise: torch.Generator | None,
    ) -> None:
        """Encode blocks (the rows of ``values``) into code bytes and scales."""

    @abc.abstractmethod
    def read(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Decode blocks."""

    def row_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """How many bytes a row of so many values takes; a multiple of 8."""
        return _aligned(self._scales_at(numel) + numel // self.block * dtype.itemsize)

    def encode(
        self, values: torch.Tensor, wire: torch.Tensor, noise: torch.Generator | None = None
    ) -> None:
        """Write rows of values into rows of bytes."""
        for row, bytes_ in zip(values, wire, strict=True):
            for part, codes, scales in self._chunks(row, bytes_):
                self.write(part, codes, scales, noise)

    def decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        """Read rows of bytes into ``out``, a matrix."""
        for row, bytes_ in zip(out, wire, strict=True):
            for part, codes, scales in self._chunks(row, bytes_):
                part.copy_(self.read(codes, scales))

    def decode_sum(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        """Read all rows of bytes and leave their sum, in order, in the vector ``out``."""
        out.zero_()
        rows = [self._chunks(out, bytes_) for bytes_ in wire]
        for parts in zip(*rows, strict=True):
            for part, codes, scales in parts:
                part.add_(self.read(codes, scales))

    def subtract(self, wire: torch.Tensor, values: torch.Tensor) -> None:
        """Take what was written out of ``values``: what is left is the error of the codec.

        Nothing is left of blocks that are not finite: an error that is NaN would stay for ever.
        """
        for row, bytes_ in zip(values, wire, strict=True):
            for part, codes, scales in self._chunks(row, bytes_):
                part.sub_(self.read(codes, scales))
                lost = ~torch.isfinite(scales)
                if lost.any():
                    part[lost] = 0.0

    def _chunks(
        self, row: torch.Tensor, wire: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Cut a row of values and its bytes into blocks x values, code bytes and scales."""
        numel = row.numel()
        start = self._scales_at(numel)
        blocks = numel // self.block
        codes = wire[: self.code_bytes(numel)].view(blocks, -1)
        scales = wire[start : start + blocks * row.element_size()].view(row.dtype)
        values = row.view(blocks, self.block)
        size = max(1, _CHUNK // self.block)
        parts = zip(values.split(size), codes.split(size), scales.split(size), strict=True)
        return list(parts)

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
        return numel

    def write(
        self,
        values: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        noise: torch.Generator | None,
    ) -> None:
        work, inverse = _normalise(values, scales, 127.0)
        torch.mul(values, inverse, out=work)
        if self.stochastic:
            work.add_(torch.rand(work.shape, generator=noise, dtype=work.dtype)).floor_()
            work.clamp_(-127.0, 127.0)
        else:
            work.round_()
        codes.view(torch.int8).copy_(work)

    def read(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return codes.view(torch.int8) * scales.unsqueeze(1)


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
        return numel

    def write(
        self,
        values: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        noise: torch.Generator | None,
    ) -> None:
        work, inverse = _normalise(values, scales, torch.finfo(self.dtype).max)
        torch.mul(values, inverse, out=work)
        codes.view(self.dtype).copy_(work)

    def read(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return codes.view(self.dtype).to(scales.dtype).mul_(scales.unsqueeze(1))


class SignCodec(Codec):
    """One bit for each value: its sign, times the mean magnitude of its block."""

    def code_bytes(self, numel: int) -> int:
        return numel // 8

    def write(
        self,
        values: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        noise: torch.Generator | None,
    ) -> None:
        torch.mean(values.abs(), dim=1, out=scales)
        bits = (values >= 0).view(*codes.shape, 8)
        weights = _bit_values(values.device)
        torch.sum(bits * weights, dim=2, dtype=torch.uint8, out=codes)

    def read(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        bits = codes.unsqueeze(2).bitwise_and(_bit_values(codes.device)).ne(0)
        magnitude = scales.unsqueeze(1)
        return torch.where(bits.view(codes.shape[0], -1), magnitude, -magnitude)


def _normalise(
    values: torch.Tensor, scales: torch.Tensor, largest: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Set scales so that each block's largest value becomes ``largest``.

    Returns a work space of the shape of ``values``, and the factor for each block: 0 for blocks of
    zeros (or as good as zero), and for those with NaN or infinity, whose scale then is not finite.
    """
    work = torch.abs(values)
    torch.amax(work, dim=1, out=scales)
    scales.div_(largest)
    inverse = scales.reciprocal()
    inverse[~torch.isfinite(inverse)] = 0.0
    return work, inverse.unsqueeze(1)


def _bit_values(device: torch.device) -> torch.Tensor:
    return torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=device)


def _aligned(count: int) -> int:
    return -(-count // 8) * 8
