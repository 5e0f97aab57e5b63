"""Cuts a rank's batch into the micro-batches of its shards.

Called by the loop over shards. It cuts everything along dimension 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.containers import contents, rebuild, tensors_in
from paceline.errors import ConfigurationError


class MicroBatches(list[Any]):
    """The micro-batches of one rank's shards, in order: what a ``ShardLoader`` yields."""


def cut_batch(batch: Any, shards: range, count: int, rank: int) -> Sequence[Any]:
    """Return one micro-batch for each of this rank's shards.

    Raises:
        ConfigurationError: If it cannot be cut into as many equal ones.
    """
    if isinstance(batch, MicroBatches):
        if len(batch) != len(shards):
            raise ConfigurationError(
                f"Rank {rank}: a loader has brought {len(batch)} micro-batches for the "
                f"{len(shards)} shards of this rank. Was it made before the number of ranks "
                "changed? Begin a new iterator."
            )
        return batch
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors_in(batch)}
    if len(sizes) != 1 or 0 in sizes or next(iter(sizes)) % len(shards):
        raise ConfigurationError(
            f"Rank {rank} runs shards {shards.start} to {shards.stop - 1} of {count}, so each "
            f"tensor of its batch must have a first dimension that is the same multiple of "
            f"{len(shards)}, not {sorted(sizes)}. Give each rank the samples of its own shards: "
            "paceline.ShardLoader does."
        )
    size = next(iter(sizes)) // len(shards)
    return [_rows(batch, index * size, size) for index in range(len(shards))]


def _rows(value: Any, begin: int, size: int) -> Any:
    """Return some rows of every tensor, in memory of their own: kernels look at alignment."""
    if isinstance(value, torch.Tensor):
        return value.narrow(0, begin, size).clone()
    parts = contents(value)
    if parts is None:
        return value
    return rebuild(value, [_rows(part, begin, size) for part in parts])
