"""Buckets are summed in rank order: the bits of adding one rank's numbers after the other."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from paceline.config import TransportChoice
from paceline.native.extension import native
from paceline.testing import run_ranks
from paceline.transport.choose import choose_transport

CPU = torch.device("cpu")
SIZES = (1, 17, 1000, 300_001)


def numbers(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Of sizes far apart, so that another order of adding them has other bits."""
    generator = torch.Generator().manual_seed(rank * 1_000_003 + numel)
    exponents = torch.randint(-20, 20, (numel,), generator=generator)
    values = torch.randn(numel, generator=generator) * 2.0**exponents
    values[rank::997] = torch.inf if rank else -torch.inf
    values[1 + rank :: 1009] = torch.nan
    return values.to(dtype)


def sums_have_the_bits(dtype: torch.dtype) -> list[bool]:
    assert dist.group.WORLD is not None
    transport = choose_transport(dist.group.WORLD, TransportChoice.SHM, CPU, 8 << 20)
    found = []
    for numel in SIZES:
        flat = transport.allocate(numel, dtype, CPU)
        flat.copy_(numbers(transport.rank, numel, dtype))
        transport.start(flat).wait()
        expected = numbers(0, numel, dtype)
        for rank in range(1, transport.world):
            expected += numbers(rank, numel, dtype)
        same = (flat == expected) | (flat.isnan() & expected.isnan())
        found.append(bool(same.all()))
    return found


@pytest.mark.skipif(native is None, reason="needs the native core: a C compiler")
@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_in_rank_order(ranks: int, dtype: torch.dtype) -> None:
    assert run_ranks(ranks, sums_have_the_bits, dtype) == [[True] * len(SIZES)] * ranks
