"""A backward that brings given gradients: for what was computed before its step could begin.

Called where shards of a rank have run in turns. Autograd's nodes and their hooks see it as any
other backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable


class _Deliver(torch.autograd.Function):
    """Something that depends on some tensors, whose gradients are known."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        """Return nothing worth having."""
        ctx.gradients = gradients
        return torch.zeros((), device=tensors[0].device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Hand the gradients out."""
        gradients, ctx.gradients = ctx.gradients, []
        return None, *gradients


def carrier_of(
    parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    """Return a tensor whose backward brings these gradients; some there must be."""
    pairs = [(p, g) for p, g in zip(parameters, gradients, strict=True) if g is not None]
    with torch.enable_grad():
        carrier: torch.Tensor = _Deliver.apply(  # type: ignore[no-untyped-call]
            [gradient for _, gradient in pairs], *[parameter for parameter, _ in pairs]
        )
    return carrier
