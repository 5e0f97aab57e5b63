"""Checksums of tensors: equal for equal bits, on every rank, device and build of torch.

Called by :mod:`paceline.ddp.agree.replicas`. Knows tensors only.

[Note: the checksum]
A tensor is read as 32-bit words w[i]; its checksum is the sum of w[i] * k[i] modulo 2**64, with
odd, irregular k[i]. Integer sums have no rounding, so neither the number of threads nor the
order in which they add matters. A single word that differs always changes the sum, because an odd
factor has an inverse; several of them cancel out with a probability of about 2**-33 at worst (where
they differ in their highest bits only). Places matter, too: two swapped values are seen. Why not a
CRC: torch has none, and a copy to the CPU for zlib costs more than this whole sum (6 GB/s on one
core).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

_PIECE_WORDS = 1 << 16
"""Words of a large tensor that are multiplied at once: they stay in the cache of a core."""

_BATCH_WORDS = 1 << 18
"""Words of small tensors that are multiplied at once: torch takes longer to start than to add."""

_MASK = (1 << 64) - 1
_WHOLE_WORDS = frozenset((torch.float32, torch.float64, torch.int32, torch.int64))
_USUAL = (torch.nn.Parameter, torch.Tensor)
_factors: dict[torch.device, torch.Tensor] = {}


@torch.no_grad()
def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return 64 bits for each tensor that stand for its bits.

    Small tensors have their factors by their place among all, so that only lists of the same
    tensors, in the same order, can be compared.
    """
    words = [_words(tensor) for tensor in tensors]
    found = [0] * len(words)
    small = [index for index, each in enumerate(words) if each.numel() <= _PIECE_WORDS]
    for batch in _batches(small, words):
        for index, value in zip(batch, _of_batch([words[i] for i in batch]), strict=True):
            found[index] = value & _MASK
    for index, each in enumerate(words):
        if each.numel() > _PIECE_WORDS:
            found[index] = _of_large(each) & _MASK
    return found


def _batches(small: Sequence[int], words: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    batch: list[int] = []
    room = _BATCH_WORDS
    for index in small:
        size = words[index].numel()
        if batch and (size > room or words[index].device != words[batch[0]].device):
            yield batch
            batch, room = [], _BATCH_WORDS
        batch.append(index)
        room -= size
    if batch:
        yield batch


def _of_batch(words: Sequence[torch.Tensor]) -> list[int]:
    together = torch.cat(list(words))
    # Differences of running sums are the sums in between: integers wrap, and nothing is rounded.
    sums = (together * _factors_on(together.device)[: together.numel()]).cumsum(0)
    ends = torch.tensor([each.numel() for each in words]).cumsum(0)
    padded = torch.cat([sums.new_zeros(1), sums])
    at_ends = padded[ends.to(sums.device)]
    return [int(value) for value in at_ends.diff(prepend=at_ends.new_zeros(1)).tolist()]


def _of_large(words: torch.Tensor) -> int:
    factors = _factors_on(words.device)
    scratch = torch.empty_like(factors[:_PIECE_WORDS])
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for number, begin in enumerate(range(0, words.numel(), _PIECE_WORDS)):
        piece = words[begin : begin + _PIECE_WORDS]
        product = torch.mul(piece, factors[: len(piece)], out=scratch[: len(piece)])
        total += product.sum() * factors[number % _BATCH_WORDS]
    return int(total)


def combine(checksums: Iterable[int]) -> int:
    """Return one checksum for several; never 0, which stands for 'not looked at'."""
    total = 0
    for each in checksums:
        total = (total * 0x9E3779B97F4A7C15 + each + 1) & _MASK
    return total or 1


def _words(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype in _WHOLE_WORDS and type(tensor) in _USUAL and tensor.is_contiguous():
        return tensor.detach().view(-1).view(torch.int32)
    data = _local(tensor.detach()).contiguous().reshape(-1)
    data = data.view(torch.uint8)
    if data.numel() % 4 or data.storage_offset() % 4:
        padded = data.new_zeros((data.numel() + 3) // 4 * 4)
        padded[: data.numel()] = data
        data = padded
    return data.view(torch.int32)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of it, as plain strided numbers."""
    part = getattr(tensor, "_local_tensor", None)  # a DTensor: a shard, the same in every replica
    if isinstance(part, torch.Tensor):
        tensor = part
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.resolve_conj().resolve_neg()


def _factors_on(device: torch.device) -> torch.Tensor:
    found = _factors.get(device)
    if found is None:
        # The finalizer of splitmix64, in wrapping integers.
        value = torch.arange(1, _BATCH_WORDS + 1, dtype=torch.int64) * -0x61C8864680B583EB
        for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
            value = (value ^ (value >> shift)) * factor
        found = _factors[device] = ((value ^ (value >> 31)) | 1).to(device)
    return found
