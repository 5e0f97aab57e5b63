"""A copy past the caches has the bits of torch.mul."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from paceline.native.extension import native
from paceline.shm.collectives import streaming
from paceline.testing import run_ranks


@pytest.mark.skipif(native is None, reason="needs the native core: a C compiler")
@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 1000, 300_001])
@pytest.mark.parametrize("offset", [0, 1, 7, 16])
@pytest.mark.parametrize("factor", [0.5, 1 / 3, 1e-30])
def test_the_bits_of_mul(
    count: int, offset: int, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "LARGE_BYTES", 0)
    source = torch.randn(count + 1)[1:] * 1e-5
    source[count // 2 :][:3] = torch.tensor([torch.nan, torch.inf, 1e-42])[
        : source[count // 2 :][:3].numel()
    ]
    target = torch.full((count + offset + 3,), 7.0)
    streaming.scale_into(target[offset : offset + count], source, factor)
    found = target[offset : offset + count]
    assert torch.equal(found.view(torch.int32), (source * factor).view(torch.int32))
    assert (target[:offset] == 7).all()
    assert (target[offset + count :] == 7).all()


@pytest.mark.parametrize(
    "source",
    [
        torch.randn(600, 600).t(),
        torch.randn(600, 600, dtype=torch.float64),
        torch.randn(600, 600, dtype=torch.bfloat16),
        torch.randn(2, 3),
        torch.randn(2, 300, 64, 20).to(memory_format=torch.channels_last),
    ],
    ids=["transposed", "float64", "bfloat16", "small", "channels last"],
)
def test_what_is_not_plain_is_left_to_torch(source: torch.Tensor) -> None:
    target = torch.zeros_like(source, memory_format=torch.contiguous_format)
    streaming.scale_into(target, source, 0.25)
    assert torch.equal(target, source * 0.25)


def sum_of_large(offset: int, numel: int) -> bool:
    group = dist.new_group(backend="paceline")
    around = torch.full((offset + numel + 5,), -1.0)
    tensor = around[offset : offset + numel]
    tensor.copy_(torch.arange(numel) % 1000 + dist.get_rank())
    dist.all_reduce(tensor, group=group)
    expected = (torch.arange(numel) % 1000) * 3 + 3.0
    is_kept = bool((around[:offset] == -1).all() and (around[offset + numel :] == -1).all())
    return is_kept and torch.equal(tensor, expected)


@pytest.mark.skipif(native is None, reason="needs the native core: a C compiler")
@pytest.mark.parametrize(("offset", "numel"), [(0, 1 << 22), (1, (1 << 21) + 3), (7, 2_500_001)])
def test_large_results_are_written_past_the_caches(offset: int, numel: int) -> None:
    assert run_ranks(3, sum_of_large, offset, numel) == [True] * 3
