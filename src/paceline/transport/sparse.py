"""Sums sparse gradients over all ranks: their rows are gathered, and every rank adds them up.

Called by the transports, by ``allreduce_hook`` and by the sums of logical shards.

[Note: sparse all-reduce on gloo]
torch's gloo group could do it (``allreduce`` of a sparse tensor), but must not be asked to. A group
has two worker threads, and each writes the name of the collective that it has completed into one
``std::string`` without a lock. Names of up to 15 letters lie in the string itself; a longer one,
``_ALLREDUCE_SPARSE``, is on the heap, and if two collectives end at the same moment one thread
writes into memory that the other has freed ("malloc(): unaligned tcache chunk detected"). Rare:
seen once in a test of 17 s, and by AddressSanitizer, with torch 2.13.0. ``ALLGATHER`` is short.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from paceline.torch_private.autograd import stored_entries
from paceline.transport.late import LateReduction
from paceline.types import Messages

INDEX_BYTES = 8


def start_sparse_sum(messages: Messages, gradient: torch.Tensor) -> LateReduction:
    """Leave the sum to whoever waits.

    Nothing is lost by that: embeddings come first in a forward, so their gradients come last.
    """
    return LateReduction(functools.partial(sum_sparse, messages, gradient))


def sum_sparse(messages: Messages, gradient: torch.Tensor) -> None:
    """Replace a sparse tensor by its sum over all ranks. Collective; blocks.

    Every rank adds the same rows in the order of the ranks: the result has the same bits on all.
    """
    gradient_rows = gradient.coalesce()
    counts = _gather_counts(messages, gradient_rows)
    if not any(counts):
        return
    packed = _pack(gradient_rows, max(counts))
    parts = messages.gather("sum of sparse gradients", packed)
    rows = [_unpack(part, count, gradient_rows) for part, count in zip(parts, counts, strict=True)]
    total = torch.sparse_coo_tensor(
        torch.cat([indices for indices, _ in rows], dim=1),
        torch.cat([values for _, values in rows]),
        gradient.shape,
        check_invariants=False,
    )
    gradient.copy_(total.coalesce())


def add_sparse(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return left + right, coalesced: rows of one side stay as they are, bit for bit."""
    left, right = left.coalesce(), right.coalesce()
    total = torch.sparse_coo_tensor(
        torch.cat([left.indices(), right.indices()], dim=1),
        torch.cat([left.values(), right.values()]),
        left.shape,
        check_invariants=False,
    )
    return total.coalesce()


def gather_sparse(
    messages: Messages, mine: Sequence[torch.Tensor], counts: Sequence[int]
) -> list[list[torch.Tensor]]:
    """Return the sparse tensors of all ranks, each of which has a number of them. Collective.

    Args:
        messages: Between the ranks.
        mine: This rank's, coalesced, all of one shape and dtype.
        counts: How many each rank has.
    """
    most = max(counts)
    rows = torch.tensor([stored_entries(each) for each in mine] + [0] * (most - len(mine)))
    what = "number of rows of sparse gradients"
    all_rows = [each.tolist() for each in messages.gather(what, rows.to(mine[0].device))]
    packed = torch.cat([_pack(each, stored_entries(each)) for each in mine])
    row_bytes = INDEX_BYTES * mine[0].sparse_dim() + _row_bytes(_real(mine[0].values()))
    longest = max(sum(each) for each in all_rows) * row_bytes
    padded = packed.new_zeros(max(longest, 1))
    padded[: len(packed)] = packed
    parts = messages.gather("sum of sparse gradients", padded)
    found = []
    for part, their_rows, count in zip(parts, all_rows, counts, strict=True):
        pieces = part[: sum(their_rows) * row_bytes].split([n * row_bytes for n in their_rows])
        pairs = list(zip(pieces, their_rows, strict=True))[:count]
        found.append([_rebuild(piece, n, mine[0]) for piece, n in pairs])
    return found


def _rebuild(packed: torch.Tensor, count: int, like: torch.Tensor) -> torch.Tensor:
    # Cloned: a piece may begin anywhere, and int64 wants to be aligned.
    indices, values = _unpack(packed.clone(), count, like)
    return torch.sparse_coo_tensor(
        indices, values, like.shape, is_coalesced=True, check_invariants=False
    )


def _gather_counts(messages: Messages, gradient: torch.Tensor) -> list[int]:
    mine = torch.tensor([stored_entries(gradient)], dtype=torch.int64, device=gradient.device)
    return [int(count) for count in messages.gather("number of rows of sparse gradients", mine)]


def _pack(gradient: torch.Tensor, count: int) -> torch.Tensor:
    """Return indices, then values, as bytes, as many as ``count`` rows take."""
    values = _real(gradient.values())
    row_bytes = INDEX_BYTES * gradient.sparse_dim() + _row_bytes(values)
    packed = torch.zeros(count * row_bytes, dtype=torch.uint8, device=gradient.device)
    parts = [as_bytes(gradient.indices()), as_bytes(values)]
    torch.cat(parts, out=packed[: sum(len(part) for part in parts)])
    return packed


def _unpack(
    packed: torch.Tensor, count: int, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices and values that another rank has packed."""
    shape = like.values().shape[1:]
    real = _real(like.values())
    end = INDEX_BYTES * like.sparse_dim() * count
    indices = packed[:end].view(torch.int64).view(like.sparse_dim(), count)
    values = packed[end : end + count * _row_bytes(real)].view(real.dtype)
    if like.is_complex():
        return indices, torch.view_as_complex(values.view(count, *shape, 2))
    return indices, values.view(count, *shape)


def _real(values: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(values) if values.is_complex() else values


def _row_bytes(values: torch.Tensor) -> int:
    return math.prod(values.shape[1:]) * values.itemsize


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements, flat, as bytes."""
    return tensor.contiguous().view(-1).view(torch.uint8)
