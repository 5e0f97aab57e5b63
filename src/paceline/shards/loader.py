"""``paceline.ShardLoader``: the samples of each shard, the same at any number of ranks.

The samples of an epoch are shuffled by seed and epoch alone and cut into rounds, and each round
into one micro-batch of fixed size for each shard. A rank loads those of its own shards. What a data
set and a collate function draw at random (augmentation) comes from a stream that belongs to the
micro-batch, whichever worker loads it.

[Note: where an epoch stands]
``position`` counts rounds that are done with. A round is, as soon as it is handed out: who saves
after its update goes on with the next one. Rounds that workers have loaded ahead do not count. In
an ``elastic.State`` only a commit moves it (:meth:`ShardLoader.advance`): rounds that were handed
out, or that a rank had that died, are loaded again from the same place. A new iterator begins the
epoch anew, unless it was told to go on: by a state that was loaded, or by ``advance``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from paceline.errors import ConfigurationError
from paceline.shards.batches import MicroBatches
from paceline.shards.streams import OwnStreams, seed_all, stream_seed
from paceline.shards.tree import Shares

_OURS = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "generator", "in_order")


class HasShares(Protocol):
    """What knows which shards this rank runs: a wrapper with shards."""

    @property
    def shard_shares(self) -> Shares:
        """Who owns what now."""


class ShardLoader:
    """Loads a round of micro-batches at a time; give each to ``ddp.shards``.

    ::

        loader = ShardLoader(dataset, ddp, micro_batch=32, num_workers=2)
        for epoch in range(EPOCHS):
            loader.set_epoch(epoch)
            for batch in loader:
                for inputs, targets in ddp.shards(batch):
                    loss(ddp(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()

    Args:
        data: A data set with a length.
        ddp: A wrapper with ``shards``.
        micro_batch: Samples of one shard in one round.
        shuffle: Draw a new order in every epoch.
        seed: Of order and streams; the same on all ranks.
        drop_last: Leave out samples that do not fill a round. Otherwise the last round is filled
            up with the first samples of the epoch: shards have one shape.
        collate_fn: As of torch's ``DataLoader``.
        options: Further arguments of ``DataLoader``: ``num_workers``, ``prefetch_factor``, ...

    Attributes:
        epoch: Which order is drawn.
        position: Rounds of this epoch that are done with.
        is_moved_by_commits: It belongs to an ``elastic.State``.
    """

    def __init__(
        self,
        data: Dataset[Any],
        ddp: HasShares,
        micro_batch: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **options: Any,
    ) -> None:
        self._ddp = ddp
        self._shards = ddp.shard_shares.tree.shards
        self.samples = _length_of(data)
        wrong = sorted(set(options) & set(_OURS))
        if wrong or micro_batch < 1:
            raise ConfigurationError(
                f"ShardLoader(micro_batch={micro_batch}, {', '.join(wrong)}): it cuts batches by "
                "itself, micro_batch samples for each shard. Leave the DataLoader's own arguments "
                f"for that out ({', '.join(_OURS)})."
            )
        self.micro_batch = micro_batch
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = self.position = 0
        self.is_moved_by_commits = self._goes_on = False
        if not self.rounds:
            raise ConfigurationError(
                f"{self.samples} samples do not fill a round of {self._shards} shards of "
                f"{micro_batch} each. Take fewer, or drop_last=False."
            )
        self._loader = DataLoader(
            SeededData(data, collate_fn or default_collate),
            batch_sampler=_Places(self),
            collate_fn=_as_it_is,
            generator=torch.Generator(),  # the process's own stream is left alone
            **options,
        )

    @property
    def rounds(self) -> int:
        """Rounds in an epoch."""
        size = self._shards * self.micro_batch
        return self.samples // size if self.drop_last else -(-self.samples // size)

    def __len__(self) -> int:
        """Rounds that a new iterator yields."""
        return max(0, self.rounds - self._begin())

    def _begin(self) -> int:
        return self.position if self.is_moved_by_commits or self._goes_on else 0

    def __iter__(self) -> Iterator[MicroBatches]:
        """Yield this rank's micro-batches of each round that is left."""
        owned = len(self._ddp.shard_shares.owned)
        number = self.position = self._begin()
        epoch, self._goes_on = self.epoch, False
        micros = MicroBatches()
        for micro in self._loader:
            micros.append(micro)
            if len(micros) == owned:
                number += 1
                if not self.is_moved_by_commits and epoch == self.epoch:
                    self.position = number
                yield micros
                micros = MicroBatches()

    def places(self) -> Iterator[SamplePlaces]:
        """Yield the samples of each micro-batch that this rank loads, in order."""
        order = self._order()
        owned, shards, size = self._ddp.shard_shares.owned, self._shards, self.micro_batch
        for number in range(self.position, self.rounds):
            for shard in owned:
                begin = (number * shards + shard) * size
                samples = [order[index % self.samples] for index in range(begin, begin + size)]
                seed = stream_seed(self.seed, self.epoch, number, shard, 1)
                yield SamplePlaces(samples, seed)

    def _order(self) -> Sequence[int]:
        if not self.shuffle:
            return range(self.samples)
        generator = torch.Generator().manual_seed(stream_seed(self.seed, self.epoch))
        order: list[int] = torch.randperm(self.samples, generator=generator).tolist()
        return order

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of another epoch; in the present one, go on where it stands."""
        if epoch != self.epoch:
            self.epoch, self.position, self._goes_on = epoch, 0, False

    def advance(self, rounds: int = 1) -> None:
        """Say that so many more rounds are done with; a new iterator goes on behind them."""
        self.position, self._goes_on = self.position + rounds, True

    def state_dict(self) -> dict[str, Any]:
        """Return where the epoch stands; good for any number of ranks."""
        return {"epoch": self.epoch, "position": self.position, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there, from the next iterator on."""
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self.seed, self._goes_on = int(state["seed"]), True


class SamplePlaces(list[int]):
    """The samples of a micro-batch, and the seed of its random stream. Travels to workers."""

    def __init__(self, samples: Sequence[int], seed: int) -> None:
        super().__init__(samples)
        self.seed = seed

    def __reduce__(self) -> tuple[Any, ...]:
        return SamplePlaces, (list(self), self.seed)


class _Places:
    """A batch sampler: DataLoader begins a new iterator of it for each of its own."""

    def __init__(self, loader: ShardLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[SamplePlaces]:
        return self._loader.places()

    def __len__(self) -> int:
        return len(self._loader) * len(self._loader._ddp.shard_shares.owned)


class SeededData(Dataset[Any]):
    """A data set that loads micro-batches, each with its own random stream.

    In one thread, as torch's workers do: kernels change their bits with the number.
    """

    def __init__(self, data: Dataset[Any], collate: Callable[[list[Any]], Any]) -> None:
        self._data = data
        self._collate = collate

    def __getitems__(self, places: SamplePlaces) -> Any:
        """Load the samples of a micro-batch, and put them together."""
        own, threads = OwnStreams(), torch.get_num_threads()
        seed_all(places.seed)
        if threads != 1:
            torch.set_num_threads(1)
        try:
            many = getattr(self._data, "__getitems__", None)
            found = many(list(places)) if many else [self._data[index] for index in places]
            return self._collate(found)
        finally:
            own.put_back()
            if threads != 1:
                torch.set_num_threads(threads)


def _as_it_is(batch: Any) -> Any:
    return batch


def _length_of(data: Any) -> int:
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
        raise ConfigurationError(
            f"ShardLoader needs a data set with a length and an index, not "
            f"{type(data).__name__}: which sample belongs to which shard must be known."
        )
    return len(data)
