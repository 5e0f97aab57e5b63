"""Sparse gradients: a bucket of one, reduced as indices and values."""

from __future__ import annotations

import torch

from paceline.buckets import Bucket, ParameterSpec
from paceline.types import Reduction, Transport


def empty_sparse(like: torch.Tensor | ParameterSpec) -> torch.Tensor:
    """Return a sparse gradient without any row, for a rank that has none."""
    return torch.sparse_coo_tensor(
        torch.empty(1, 0, dtype=torch.int64),
        torch.empty(0, *like.shape[1:], dtype=like.dtype),
        like.shape,
        device=like.device,
        is_coalesced=True,
        check_invariants=False,
    )


def copy_in_sparse(bucket: Bucket, gradient: torch.Tensor | None, factor: float) -> None:
    """Put a gradient, times ``factor``, into its bucket ([Note: scaling] in gradient_access.py)."""
    slot = bucket.slots[0]
    if gradient is None or factor == 0:
        bucket.sparse_gradient = empty_sparse(slot.spec)
        return
    if not gradient.is_sparse:
        raise TypeError(
            f"expected a sparse gradient, because its module says sparse=True, but it is "
            f"{gradient.layout}"
        )
    coalesced = gradient.detach().coalesce()
    bucket.sparse_gradient = coalesced * factor if factor != 1.0 else coalesced.clone()


def start_sparse(
    bucket: Bucket, transport: Transport, known_rows: torch.Tensor | None
) -> Reduction:
    """Begin the reduction; with ``known_rows`` all ranks send those rows, densely."""
    gradient = bucket.sparse_gradient
    assert gradient is not None
    if known_rows is None:
        return transport.start_sparse(gradient)
    gradient = gradient.coalesce()
    rows = known_rows.reshape(-1)
    shape = bucket.slots[0].spec.shape
    dense = torch.zeros(len(rows), *shape[1:], dtype=gradient.dtype, device=gradient.device)
    dense[torch.searchsorted(rows, gradient.indices()[0])] = gradient.values()
    bucket.sparse_gradient = torch.sparse_coo_tensor(
        rows.unsqueeze(0), dense, shape, is_coalesced=True, check_invariants=False
    )
    return transport.start(dense)
