"""Bytes written into a tensor as numbers, and read back after a sum: below the control block.

A block has a few dozen numbers. Where they are float32 in a CPU's memory, the native core writes
and reads them there: torch takes longer to find its kernels than they take. Elsewhere torch does.
"""

from __future__ import annotations

import torch

from paceline.native.extension import native


def write_bytes(trailer: torch.Tensor, data: bytearray) -> None:
    """Let each number of a contiguous tensor be one of the bytes; it has as many."""
    if _is_cpu_float32(trailer):
        native.write_floats(trailer.data_ptr(), data)
    else:
        trailer.copy_(torch.frombuffer(data, dtype=torch.uint8))


def read_bytes(trailer: torch.Tensor, count: int) -> tuple[bytes, tuple[int, ...]]:
    """Return the first ``count`` numbers, which are bytes again, and the rest, which are counts."""
    numbers = trailer.real if trailer.is_complex() else trailer
    rest = tuple(map(int, numbers[count:].tolist())) if trailer.numel() > count else ()
    if _is_cpu_float32(trailer):
        data: bytes = native.read_floats(trailer.data_ptr(), count)
        return data, rest
    return bytes(map(int, numbers[:count].tolist())), rest


def _is_cpu_float32(trailer: torch.Tensor) -> bool:
    return native is not None and trailer.dtype is torch.float32 and trailer.is_cpu
