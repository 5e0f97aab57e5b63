"""Bytes written into a tensor as numbers, and read back after a sum: below the control block.

A block has a few dozen numbers. Where they are float32 in a CPU's memory, the native core writes
and reads them there: torch takes longer to find its kernels than they take. Elsewhere torch does.
"""

from __future__ import annotations

import torch

from paceline.native.extension import native


def write_bytes(tail: torch.Tensor, data: bytearray) -> None:
    """Let each number of a contiguous tensor be one of the bytes; it has as many."""
    if _is_plain(tail):
        native.write_floats(tail.data_ptr(), data)
    else:
        tail.copy_(torch.frombuffer(data, dtype=torch.uint8))


def read_bytes(tail: torch.Tensor, count: int) -> tuple[bytes, tuple[int, ...]]:
    """Return the first ``count`` numbers, which are bytes again, and the rest, which are counts."""
    numbers = tail.real if tail.is_complex() else tail
    rest = tuple(map(int, numbers[count:].tolist())) if tail.numel() > count else ()
    if _is_plain(tail):
        data: bytes = native.read_floats(tail.data_ptr(), count)
        return data, rest
    return bytes(map(int, numbers[:count].tolist())), rest


def _is_plain(tail: torch.Tensor) -> bool:
    return native is not None and tail.dtype is torch.float32 and tail.is_cpu
