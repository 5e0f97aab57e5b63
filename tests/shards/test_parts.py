"""A rank's parts are laid out piece by piece as a bucket is, whatever a piece is.

And what a rank adds to its bucket piece by piece has the bits of whole tensors, step by step.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.shards import sums
from paceline.shards.parts import LaidOutParts
from paceline.shards.sums import Addend, Gradients, add_in_pieces, add_small
from paceline.shards.tree import Shares

SHAPES = [((2, 3), (3, 1)), ((4,), (1,)), ((3, 4), (1, 3)), ((), ()), ((2, 2, 2), (4, 1, 2))]


def bucket() -> Any:
    specs, offsets, at = [], [], 0
    for shape, stride in SHAPES:
        numel = torch.Size(shape).numel()
        specs.append(SimpleNamespace(shape=torch.Size(shape), stride=stride, numel=numel))
        offsets.append(at)
        at += numel
    slots = [SimpleNamespace(spec=spec) for spec in specs]
    return SimpleNamespace(slots=slots, spec=SimpleNamespace(offsets=offsets, numel=at))


def gradients(first: float) -> list[torch.Tensor | None]:
    """Some in the order of their slots, some not, and one that is missing."""
    found: list[torch.Tensor | None] = []
    for shape, _ in SHAPES:
        numel = torch.Size(shape).numel()
        found.append(torch.arange(first, first + numel).view(shape))
        first += numel
    found[1] = None
    return found


def laid_out(values: list[torch.Tensor | None], numel: int) -> torch.Tensor:
    flat = torch.zeros(numel)
    at = 0
    for value, (shape, stride) in zip(values, SHAPES, strict=True):
        if value is not None:
            flat.as_strided(shape, stride, at).copy_(value)
        at += torch.Size(shape).numel()
    return flat


@pytest.mark.parametrize("size", [1, 2, 5, 7, 24, 100])
def test_pieces_make_the_whole(size: int) -> None:
    made, trailer = bucket(), 3
    numel = made.spec.numel + trailer
    last = torch.randn(numel)
    others = [gradients(1.0), gradients(100.0)]
    expected = [laid_out(values, numel) for values in others]
    parts = LaidOutParts(Shares(7, 0, 1), made, last, lambda: others)
    found: list[list[torch.Tensor]] = [[], [], []]
    for begin in range(0, numel, size):
        for into, piece in zip(found, parts(begin, min(begin + size, numel)), strict=True):
            into.append(piece.clone())
        rest = [value for values in others for value in values if value is not None]
        assert bool(rest) == (begin + size < made.spec.numel), "gradients are let go of"
    for pieces, whole in zip(found, [*expected, last], strict=True):
        assert torch.equal(torch.cat(pieces), whole)


SMALL, PIECE = 20, 32
ADDENDS = ((1.0, 1.0), (1.0, 1 / 11), (1 / 11, 1.0))
"""Before and after, as they are below the root, at a child of it, and at the root."""


@pytest.fixture
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


def addend(views: list[torch.Tensor], seed: int, missing: int) -> Gradients:
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
@pytest.mark.usefixtures("_small_pieces")
def test_as_step_by_step(count: int, dtype: torch.dtype, add: Callable[..., None]) -> None:
    """Also where a gradient is missing: it counts as +0.0."""
    flat, views = flat_and_views(dtype)
    views[2].view(-1)[::2] = -0.0
    addends = [
        Addend(addend(views, number, missing=2 + number % 2), before, after)
        for number, (before, after) in enumerate(ADDENDS[:count])
    ]
    expected = step_by_step(views, addends)
    add(views, addends, flat)
    for found, wanted in zip(views, expected, strict=True):
        assert torch.equal(found, wanted)
        assert torch.equal(found.signbit(), wanted.signbit())
