"""A rank's parts are laid out piece by piece as a bucket is, whatever a piece is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.shards.parts import LaidOutParts
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
