"""Gradients of earlier rounds, which what a round brings is added to.

Called by the loop over shards: it takes them away before a round, and adds them at its end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.config import GradientViews
from paceline.shards.sums import Gradients
from paceline.transport.sparse import add_sparse


def take_gradients(parameters: Sequence[torch.Tensor], views: GradientViews) -> Gradients:
    """Take away what parameters have; a copy, where a step would write into it."""
    before: Gradients = [parameter.grad for parameter in parameters]
    is_overwritten = views is GradientViews.ALWAYS
    for index, gradient in enumerate(before):
        if gradient is not None:
            before[index] = gradient.clone() if is_overwritten else gradient
            parameters[index].grad = None
    return before


def add_gradients(
    parameters: Sequence[torch.Tensor], before: Sequence[torch.Tensor | None]
) -> None:
    """Add what was taken away to what parameters have now."""
    with torch.no_grad():
        for parameter, old in zip(parameters, before, strict=True):
            if old is None:
                continue
            if parameter.grad is None:
                parameter.grad = old
            elif old.is_sparse or parameter.grad.is_sparse:
                parameter.grad = add_sparse(old, parameter.grad)
            else:
                parameter.grad.add_(old)
