"""Where an epoch of the data stands, and which part of each global batch a rank takes: pure.

The base of :class:`paceline.elastic.DistributedSampler` and
:class:`paceline.elastic.IterableCursor`. Must not know data sets, loaders or processes.

[Note: where an epoch stands]
The position counts global batches that were committed. Only ``state.commit()`` moves it, never what
a loader has fetched: batches that were prefetched for a step that is done again, or by a
rank that died, are cut again from the same place. So every sample is trained on exactly once.

[Note: shares and micro-batches]
Each rank takes its share of a global batch; shares differ by one sample at most, and steps in which
they differ are weighted. With ``micro_batch``, a share that is larger comes in several pieces, as
many on every rank, and gradients are accumulated over them (:meth:`State.micro_batch`). So the
global batch stays when ranks die, however few are left.

A rank may have no sample in a share or a piece: there are fewer samples than ranks, or pieces. It
gets the first sample of the global batch instead, which counts nothing: its step has the weight 0,
its piece the factor 0. Layers that look at the whole batch, such as BatchNorm, do see it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from paceline.errors import ConfigurationError

logger = logging.getLogger("paceline.elastic")

_NO_EPOCH = (
    "all batches of epoch %d are committed, so this pass over the data has none: call set_epoch() "
    "with the next number before each pass"
)


def share_of(size: int, rank: int, world: int) -> range:
    """The part of a batch of ``size`` samples that a rank takes; sizes differ by one at most."""
    base, more = divmod(size, world)
    begin = rank * base + min(rank, more)
    return range(begin, begin + base + (rank < more))


class BatchCursor:
    """The position in an epoch, and this rank's place.

    Args:
        global_batch: Samples in a step, over all ranks.
        micro_batch: The most samples that a rank takes in one forward; None: all of its share.

    Attributes:
        epoch: Of the data.
        position: Global batches of this epoch that are committed.
        rank: Of this process in the present epoch of the membership.
        world: How many ranks share a batch.
        on_size: Told when the global batch that is trained next may have another size, or other
            shares, than the one before.
    """

    def __init__(self, global_batch: int, micro_batch: int | None = None) -> None:
        for name, value in (("global_batch", global_batch), ("micro_batch", micro_batch or 1)):
            if type(value) is not int or value < 1:
                raise ConfigurationError(f"{name} is an int of at least 1 sample, not {value!r}")
        self.global_batch = global_batch
        self.micro_batch = micro_batch
        self.epoch = self.position = 0
        self.rank, self.world = _default_place()
        self.on_size: Callable[[], None] | None = None
        self._is_told = True  # in which epoch the next pass is

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch; in the present one, go on where it stands."""
        self._is_told = True
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0
            self._tell_size()

    def set_place(self, rank: int, world: int) -> None:
        """Share batches among other ranks from the next iterator on. Called by ``elastic.run``."""
        self.rank, self.world = rank, world
        self._tell_size()

    def _tell_size(self) -> None:
        if self.on_size is not None:
            self.on_size()

    def advance(self, batches: int) -> None:
        """Commit so many global batches."""
        self.position += batches

    def _check_pass(self, *, is_empty: bool) -> None:
        """Say so if a pass over the data has nothing in it because nobody has begun an epoch."""
        is_told, self._is_told = self._is_told, False
        if is_empty and not is_told:
            logger.warning(_NO_EPOCH, self.epoch)

    def next_size(self) -> int:
        """Samples in the global batch that is trained next."""
        return self.global_batch

    def weight(self) -> int:
        """Samples of this rank in the global batch that is trained next."""
        return len(share_of(self.next_size(), self.rank, self.world))

    def is_even(self) -> bool:
        """Whether all ranks have as many samples in that batch."""
        return self.next_size() % self.world == 0

    def pieces(self, size: int) -> list[range]:
        """Cut this rank's share of a global batch: [Note: shares and micro-batches]."""
        share = share_of(size, self.rank, self.world)
        count = self.count_pieces(size)
        parts = [share_of(len(share), number, count) for number in range(count)]
        return [share[part.start : part.stop] for part in parts]

    def count_pieces(self, size: int) -> int:
        """In how many pieces the shares of a global batch come, on every rank."""
        largest = -(-size // self.world)
        return 1 if self.micro_batch is None else max(1, -(-largest // self.micro_batch))

    def state_dict(self) -> dict[str, Any]:
        """Return where the epoch stands; good for any number of ranks."""
        return {"epoch": self.epoch, "position": self.position, "global_batch": self.global_batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there.

        Raises:
            ConfigurationError: The batches were of another size: the position means another place.
        """
        saved = state.get("global_batch", self.global_batch)
        if saved != self.global_batch and state["position"]:
            raise ConfigurationError(
                f"the data stands at global batch {state['position']} of {saved} samples, and here "
                f"a global batch has {self.global_batch}: take {saved}, or begin the epoch anew"
            )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._tell_size()


def _default_place() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
