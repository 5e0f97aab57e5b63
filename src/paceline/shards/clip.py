"""``paceline.clip_grad_norm_``: the norm of all gradients, in an order of its own.

torch's function gives other bits at another number of threads, or another order of parameters.
Here each piece of at most :data:`PIECE` elements is small enough for one thread, squares are summed
in float64, and the sum over pieces is exact (``math.fsum``), so that no order matters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from paceline.errors import NonFiniteGradientError

PIECE = 32768
"""torch uses one thread for up to so many elements."""


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    *,
    error_if_nonfinite: bool = False,
) -> float:
    """Scale gradients down so that their 2-norm is at most ``max_norm``; return what it was.

    The same bits at any number of ranks and threads, if the gradients have the same bits.

    Args:
        parameters: Whose gradients; those without one are left out.
        max_norm: The largest norm.
        error_if_nonfinite: Raise if the norm is NaN or infinite.

    Raises:
        NonFiniteGradientError: Then.
    """
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    gradients = [_values(p) for p in parameters if p.grad is not None]
    squares = [square for each in gradients for square in _squares(each)]
    norm = math.sqrt(math.fsum(squares)) if all(map(math.isfinite, squares)) else math.nan
    if math.isnan(norm) and error_if_nonfinite:
        raise NonFiniteGradientError(
            "clip_grad_norm_: the norm of the gradients is non-finite, so it cannot be clipped, "
            "because some gradient is. nonfinite='raise' names it; error_if_nonfinite=False clips "
            "nothing then."
        )
    coefficient = max_norm / (norm + 1e-6)
    if coefficient < 1.0:
        for gradient in gradients:
            gradient.mul_(coefficient)
    return norm


def _values(parameter: torch.Tensor) -> torch.Tensor:
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        parameter.grad = gradient = gradient.coalesce()
        gradient = gradient.values()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def _squares(gradient: torch.Tensor) -> list[float]:
    """Return the sum of squares of each piece."""
    pieces = gradient.reshape(-1).split(PIECE)
    norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces]
    return [norm * norm for norm in torch.stack(norms).tolist()] if norms else []
