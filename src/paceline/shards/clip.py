"""``paceline.clip_grad_norm_``: the norm of all gradients, in an order of its own.

torch's function gives other bits at another number of threads, or another order of parameters.
Here each piece of at most :data:`PIECE` elements is small enough for one thread, powers are summed
in float64, and the sum over pieces is exact (``math.fsum``), so that no order matters.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence

import torch

from paceline.errors import ConfigurationError, NonFiniteGradientError

PIECE = 32768
"""torch uses one thread for up to so many elements."""


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients down so that their norm is at most ``max_norm``; return what it was.

    As ``torch.nn.utils.clip_grad_norm_``, with the same bits at any number of ranks and threads, if
    the gradients have the same bits. There is one implementation, so there is no ``foreach``.

    Args:
        parameters: Whose gradients; those without one are left out.
        max_norm: The largest norm.
        norm_type: Which norm: 2, 1, any other positive number, or infinity for the largest value.
        error_if_nonfinite: Raise if the norm is NaN or infinite. Otherwise nothing is clipped then.

    Returns:
        The norm, on the device and in the dtype of the gradients; real, and the widest of them.

    Raises:
        NonFiniteGradientError: As ``error_if_nonfinite`` says.
    """
    order = float(norm_type)
    if not order > 0.0:
        raise ConfigurationError(
            f"clip_grad_norm_(norm_type={norm_type!r}): write a positive number, for example 2, or "
            "math.inf for the largest value."
        )
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    gradients = [_values(p) for p in parameters if p.grad is not None]
    norm = _combine([each for gradient in gradients for each in _norms(gradient, order)], order)
    if error_if_nonfinite and not math.isfinite(norm):
        raise NonFiniteGradientError(
            "clip_grad_norm_: the norm of the gradients is non-finite, so it cannot be clipped, "
            "because some gradient is. nonfinite='raise' names it; error_if_nonfinite=False clips "
            "nothing then."
        )
    coefficient = float(max_norm) / (norm + 1e-6)
    if coefficient < 1.0 and math.isfinite(norm):
        for gradient in gradients:
            gradient.mul_(coefficient)
    dtypes = [gradient.dtype.to_real() for gradient in gradients]
    dtype = functools.reduce(torch.promote_types, dtypes, dtypes[0] if dtypes else torch.float32)
    return torch.tensor(norm, dtype=dtype, device=gradients[0].device if gradients else None)


def _values(parameter: torch.Tensor) -> torch.Tensor:
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        parameter.grad = gradient = gradient.coalesce()
        gradient = gradient.values()
    return gradient


def _norms(gradient: torch.Tensor, order: float) -> list[float]:
    """Return the norm of each piece."""
    if not gradient.numel():
        return []
    pieces = gradient.reshape(-1).split(PIECE)
    dtype = torch.complex128 if gradient.is_complex() else torch.float64
    norms = [torch.linalg.vector_norm(piece, order, dtype=dtype) for piece in pieces]
    found: list[float] = torch.stack(norms).tolist()
    return found


def _combine(norms: Sequence[float], order: float) -> float:
    """Return the norm of all pieces, exactly summed."""
    if not all(map(math.isfinite, norms)):
        return math.nan if any(map(math.isnan, norms)) else math.inf
    largest = max(norms, default=0.0)
    if order == math.inf or largest == 0.0:
        return largest
    # Relative to the largest: powers could overflow.
    total = math.fsum((norm / largest) ** order for norm in norms)
    return float(largest * total ** (1.0 / order))
