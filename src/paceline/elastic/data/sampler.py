"""``elastic.DistributedSampler``: the same global batches, whatever the number of ranks.

A batch sampler for torch's ``DataLoader``. The samples of an epoch are shuffled by seed and epoch
alone and cut into global batches; each rank takes its share of each. When the number of ranks
changes, the global batches stay, and are shared out anew from the first that is not committed
([Note: where an epoch stands] in cursor.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch

from paceline.elastic.data.cursor import BatchCursor
from paceline.errors import ConfigurationError


class DistributedSampler(BatchCursor):
    """Shares out global batches; give it to ``DataLoader(dataset, batch_sampler=sampler)``.

    Args:
        data: The data set, or its length.
        global_batch: Samples in a step, over all ranks.
        micro_batch: The most samples that a rank takes in one forward. A larger share comes in
            several batches; train on them under :meth:`State.micro_batch`.
        shuffle: Draw a new order in every epoch.
        seed: Of that order; the same on all ranks.
        drop_last: Leave out what is left over when all batches are full. Otherwise it is a batch
            of its own, or, if it is less than half of one, joins the last.

    Attributes:
        epoch: Which order is drawn.
        position: Global batches of this epoch that are committed.
        rank: Of this process in the present epoch of the membership.
        world: How many ranks share a batch.
    """

    def __init__(
        self,
        data: Sized | int,
        global_batch: int,
        *,
        micro_batch: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(global_batch, micro_batch)
        self.samples = data if isinstance(data, int) else len(data)
        if self.samples < 1:
            raise ConfigurationError(f"a sampler needs samples, not {self.samples} of them")
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last

    def __len__(self) -> int:
        """Batches that are left for this rank in this epoch: for each global batch one or more."""
        left = range(self.position, self.batches)
        return sum(self.count_pieces(self.batch_size(index)) for index in left[-2:]) + (
            self.count_pieces(self.global_batch) * max(0, len(left) - 2)
        )

    @property
    def batches(self) -> int:
        """Global batches in an epoch."""
        full, rest = divmod(self.samples, self.global_batch)
        if self.drop_last:
            return full
        return max(1, full + (2 * rest >= self.global_batch))

    def batch_size(self, index: int) -> int:
        """Samples in a global batch."""
        is_last = index == self.batches - 1
        if is_last and not self.drop_last:
            return self.samples - index * self.global_batch
        return self.global_batch

    def advance(self, batches: int) -> None:
        """Commit so many global batches."""
        self.position += batches
        if (self.position + 2) * self.global_batch > self.samples:
            self._tell_size()  # the last one has another size

    def next_size(self) -> int:
        """Samples in the global batch that is trained next."""
        return self.batch_size(min(self.position, self.batches - 1))

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's indices of every global batch that is not committed."""
        self._check_pass(is_empty=self.position >= self.batches)
        order = self._order()
        for index in range(self.position, self.batches):
            begin = index * self.global_batch
            for piece in self.pieces(self.batch_size(index)):
                mine = order[begin + piece.start : begin + piece.stop].tolist()
                yield mine or [int(order[begin])]  # it counts nothing: see cursor.py

    def _order(self) -> torch.Tensor:
        """As a tensor: a list of a million numbers would delay the first step after a death."""
        if not self.shuffle:
            return torch.arange(self.samples)
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(self.samples, generator=generator)

    def state_dict(self) -> dict[str, Any]:
        """Return where the epoch stands; good for any number of ranks."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "global_batch": self.global_batch,
            "seed": self.seed,
            "samples": self.samples,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there.

        Raises:
            ConfigurationError: The data set, or the batches, had another size.
        """
        if state.get("samples", self.samples) != self.samples and state["position"]:
            raise ConfigurationError(
                f"the data set had {state['samples']} samples and has {self.samples} now: where "
                "its epoch stands means nothing. Take the same data, or begin the epoch anew"
            )
        super().load_state_dict(state)
        self.seed = int(state["seed"])
