"""Records checksums of a training over shards into its run folder, for ``paceline verify``.

Told by the loop over shards of every round, micro-batch and output. Does nothing without a run
folder. What is written: :mod:`paceline.observe.checksum_file`.
"""

from __future__ import annotations

import itertools
import os
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from paceline.containers import tensors_in
from paceline.ddp.agree.checksum import checksums, combine
from paceline.observe.checksum_file import ChecksumWriter, RoundChecksums
from paceline.observe.run_folder import RUN_DIR, recorded_rank

_recording: WeakValueDictionary[tuple[str, int], ShardRecord] = WeakValueDictionary()


class ShardRecord:
    """The checksums of one wrapper's rounds.

    Args:
        module: Whose parameters and buffers.
        every: Rounds between two that are recorded; 0: none.
        shards: How many there are.
    """

    def __init__(self, module: torch.nn.Module, every: int, shards: int) -> None:
        self._module = module
        self._every = every
        self._shards = shards
        self._writer: ChecksumWriter | None = None
        folder = os.environ.get(RUN_DIR)
        if folder and every:
            rank = recorded_rank(dist.get_rank())
            self._writer = ChecksumWriter(folder, rank, wrapper=self._number(folder))
        self._found: RoundChecksums | None = None
        self._inputs: dict[int, str] = {}

    def _number(self, folder: str) -> int:
        """The first that no other wrapper of this process has."""
        number = next(n for n in itertools.count() if (folder, n) not in _recording)
        _recording[folder, number] = self
        return number

    def open(self, number: int, rank: int) -> None:
        """A round begins; rank 0 looks at the state that all ranks have."""
        self._found = None
        writer = self._writer
        if writer is None or number % self._every or not writer.wants(number):
            return
        self._found = RoundChecksums(number, count=self._shards)
        if rank == 0:
            named = [*self._module.named_parameters(), *self._module.named_buffers()]
            sums = checksums([tensor for _, tensor in named])
            self._found.tensors.update(
                (name, f"{value:016x}") for (name, _), value in zip(named, sums, strict=True)
            )

    def take_input(self, shard: int, micro: Any) -> None:
        """A shard begins with this micro-batch."""
        if self._found is not None:
            self._inputs[shard] = _checksum(micro)

    def take_output(self, shard: int, output: Any) -> None:
        """The module has made this of it."""
        if self._found is not None:
            self._found.shards[shard] = (self._inputs[shard], _checksum(output))

    def close(self) -> None:
        """The round is complete."""
        found, self._found = self._found, None
        if found is not None and self._writer is not None:
            self._writer.write(found)


def _checksum(value: Any) -> str:
    return f"{combine(checksums(list(tensors_in(value)))):016x}"
