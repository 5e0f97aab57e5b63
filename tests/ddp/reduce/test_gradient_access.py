"""[Note: scaling]: a slot that was copied holds its gradient times the factor, however it came."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.buckets import BucketSpec, ParameterSpec, Slot
from paceline.buckets.bucket import Bucket
from paceline.config import GradientViews
from paceline.ddp.reduce.gradient_access import LocalAccess

FACTORS = (1.0, 0.5, 1.0 / 3.0)
LARGE = (1 << 15) + 7  # more than 128 KiB of float32
views = pytest.mark.parametrize("views", [GradientViews.SAFE, GradientViews.NEVER])


def bucket_of(*numels: int, dtype: torch.dtype = torch.float32) -> Bucket:
    parameters = [nn.Parameter(torch.zeros(numel, dtype=dtype)) for numel in numels]
    specs = tuple(ParameterSpec.of(i, f"p{i}", p) for i, p in enumerate(parameters))
    bucket = Bucket(0, BucketSpec(specs, 0), parameters, trailer_numel=2)
    bucket.attach(torch.full((bucket.total_numel,), 7.0, dtype=dtype))
    return bucket


def give_gradient(slot: Slot, kind: str) -> torch.Tensor:
    """Let a parameter have a gradient; return its values."""
    values = torch.randn_like(slot.parameter.detach())
    assert slot.view is not None
    if kind == "none":
        return torch.zeros_like(values)
    slot.parameter.grad = slot.view.copy_(values) if kind == "view" else values.clone()
    return values


@views
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("numels", [(3,), (LARGE,), (3, 5, 1, 4)])
def test_every_slot_is_scaled_once(
    views: GradientViews, factor: float, dtype: torch.dtype, numels: tuple[int, ...]
) -> None:
    bucket = bucket_of(*numels, dtype=dtype)
    for first in range(3):
        kinds = [("none", "view", "tensor")[(first + i) % 3] for i in range(len(numels))]
        for slot in bucket.slots:
            slot.parameter.grad = None
        expected = [give_gradient(*pair) for pair in zip(bucket.slots, kinds, strict=True)]
        unpublished = LocalAccess(views).copy_in(bucket.slots, factor)
        for slot, kind, values in zip(bucket.slots, kinds, expected, strict=True):
            assert slot.view is not None
            assert torch.equal(slot.view, values * factor)
            is_shown = slot.parameter.grad is slot.view
            assert (slot in unpublished) is not is_shown
            assert is_shown is (kind == "view" or (kind == "tensor" and views is views.SAFE))
    assert bucket.trailer is not None
    assert bucket.trailer.tolist() == [7, 7]
