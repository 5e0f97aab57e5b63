"""Adding to gradients piece by piece has the bits of adding whole tensors, step by step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paceline.shards import sums
from paceline.shards.sums import Addend, Gradients, add_in_pieces, add_small

SMALL, PIECE = 20, 32
ADDENDS = ((1.0, 1.0), (1.0, 1 / 11), (1 / 11, 1.0))
"""Before and after, as they are below the root, at a child of it, and at the root."""


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "SMALL", SMALL)
    monkeypatch.setattr(sums, "PIECE", PIECE)


def flat_and_views(dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Small ones, lines of one piece and of several, one that is turned, and a scalar."""
    shapes = [((3,), (1,)), ((5, 5), (5, 1)), ((7, 11), (11, 1)), ((4, 9), (1, 4)), ((), ())]
    flat = torch.randn(200, generator=torch.Generator().manual_seed(0)).to(dtype)
    views, at = [], 0
    for shape, stride in shapes:
        views.append(flat.as_strided(shape, stride, at))
        at += views[-1].numel()
    return flat[:at], views


def gradients(views: list[torch.Tensor], seed: int, missing: int) -> Gradients:
    generator = torch.Generator().manual_seed(seed)
    found: Gradients = [torch.randn(v.shape, generator=generator).to(v.dtype) for v in views]
    found[missing] = None
    return found


def step_by_step(views: list[torch.Tensor], addends: list[Addend]) -> list[torch.Tensor]:
    """What each tensor must become, with a rounding for every operation."""
    found = []
    for index, view in enumerate(views):
        total = view.clone()
        for each in addends:
            value = each.values[index]
            total = total + (torch.zeros(()).to(total) if value is None else value * each.before)
            total = total * each.after
        found.append(total)
    return found


@pytest.mark.parametrize(
    "add",
    [
        lambda views, addends, flat: add_in_pieces(views, addends, torch.empty(PIECE).to(flat)),
        add_small,
    ],
    ids=["pieces", "small"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_as_step_by_step(count: int, dtype: torch.dtype, add: Callable[..., None]) -> None:
    """Also where a gradient is missing: it counts as +0.0."""
    flat, views = flat_and_views(dtype)
    views[2].view(-1)[::2] = -0.0
    addends = [
        Addend(gradients(views, number, missing=2 + number % 2), before, after)
        for number, (before, after) in enumerate(ADDENDS[:count])
    ]
    expected = step_by_step(views, addends)
    add(views, addends, flat)
    for found, wanted in zip(views, expected, strict=True):
        assert torch.equal(found, wanted)
        assert torch.equal(found.signbit(), wanted.signbit())
