"""The linear algebra of PowerSGD, on batches of matrices, in the forms that a CPU does fast.

Called by :mod:`paceline.hooks.powersgd`. M is batch x n x m, P is batch x n x r, Q is batch x m x
r. Pure: knows tensors and nothing else. With r of 1 to 4, general matrix products spend most of
their time on preparing for something larger: column by column is up to 20 times faster (measured,
see docs/performance-log.md).
"""

from __future__ import annotations

import torch

_COLUMNWISE = 8  # from here on, a general product is as fast


def project(matrix: torch.Tensor, q: torch.Tensor, p: torch.Tensor) -> None:
    """P = M Q."""
    if q.shape[2] >= _COLUMNWISE:
        torch.bmm(matrix, q, out=p)
        return
    for column in range(q.shape[2]):
        p[:, :, column : column + 1] = torch.bmm(matrix, _column(q, column))


def project_back(matrix: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> None:
    """Q = M^T P, as (P^T M)^T: rows of M are then read as they lie."""
    q.copy_(torch.bmm(p.transpose(1, 2), matrix).transpose(1, 2))


def multiply(p: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> None:
    """M = P Q^T."""
    if q.shape[2] >= _COLUMNWISE:
        torch.bmm(p, q.transpose(1, 2), out=out)
        return
    torch.mul(_column(p, 0), _column(q, 0).transpose(1, 2), out=out)
    for column in range(1, q.shape[2]):
        out.baddbmm_(_column(p, column), _column(q, column).transpose(1, 2))


def orthogonalize(matrices: torch.Tensor, epsilon: float) -> None:
    """Make the columns of each matrix orthonormal, in place.

    By Gram-Schmidt for up to two columns and for 16-bit numbers, else by QR. A column of zeros
    stays zero: the matrix then simply has a lower rank.

    Args:
        matrices: batch x rows x columns, at least as many rows as columns.
        epsilon: Added to the length that a column is divided by.
    """
    columns = matrices.shape[2]
    if columns > 2 and matrices.dtype in (torch.float32, torch.float64):
        matrices.copy_(torch.linalg.qr(matrices).Q)
        return
    for number in range(columns):
        column = _column(matrices, number)
        _normalise(column, epsilon)
        if number + 1 < columns:
            rest = matrices[:, :, number + 1 :]
            rest -= torch.sum(column * rest, dim=1, keepdim=True) * column


def _normalise(column: torch.Tensor, epsilon: float) -> None:
    # By the largest value first: squares of large gradients are out of range.
    largest = column.abs().amax(dim=1, keepdim=True)
    unit = torch.where(largest == 0, 1.0, largest)
    column.div_(unit)
    length = torch.linalg.vector_norm(column, dim=1, keepdim=True)
    length += epsilon / unit
    column.div_(torch.where(length == 0, 1.0, length))


def _column(matrices: torch.Tensor, number: int) -> torch.Tensor:
    return matrices[:, :, number : number + 1]
