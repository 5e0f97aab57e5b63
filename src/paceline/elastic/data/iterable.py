"""``elastic.IterableCursor``: global batches out of a stream, each sample exactly once.

For data that has no index: files read one after the other, a data base, a generator. It is what an
iterable data set and its ``DataLoader`` are together.

[Note: exactly once out of a stream]
The order of the stream is the order of the samples: global batch k is samples k B to (k + 1) B,
whatever the number of ranks. Each rank opens the stream at the first batch that is not committed,
and takes its share of each batch; what belongs to others it reads and drops. So a stream must give
the same samples in the same order on every rank and every time it is opened for an epoch, and one
that can begin in the middle cheaply should (``open_stream(epoch, start)``).

With workers, worker w of W cuts every W-th batch, and the loader takes them in turn: the same
batches in the same order as without.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from paceline.elastic.data.cursor import BatchCursor
from paceline.errors import ConfigurationError

OpenStream = Callable[[int, int], Iterable[Any]]
"""(epoch, start) -> the samples of that epoch from number ``start`` on."""


class IterableCursor(BatchCursor):
    """This rank's part of a stream, batch by batch; iterate over it as over a loader.

    Every rank, and every worker of a loader, reads the stream and drops what is not its own.

    Example::

        def open_stream(epoch, start):
            for path in shuffled(PATHS, seed=epoch):
                ...                                    # skip files before `start`, if you can
        cursor = elastic.IterableCursor(open_stream, global_batch=256, num_workers=2)
        state = elastic.State(model=ddp, optimizer=opt, data=cursor, step=0, epoch=0)
        for inputs, targets in cursor: ...

    Args:
        stream: A function of the epoch and of the number of the first sample wanted; or an
            iterable, such as an ``IterableDataset``, which is read from its beginning each time.
        global_batch: Samples in a step, over all ranks.
        micro_batch: The most samples that a rank takes in one forward (:meth:`State.micro_batch`).
        drop_last: Leave out the last global batch if it is not full.
        collate_fn: Makes a batch of a list of samples.
        loader: For ``DataLoader``: ``num_workers``, ``persistent_workers``, ``prefetch_factor``,
            ``pin_memory``, ``worker_init_fn`` and the like.
    """

    def __init__(
        self,
        stream: OpenStream | Iterable[Any],
        global_batch: int,
        *,
        micro_batch: int | None = None,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        **loader: Any,
    ) -> None:
        super().__init__(global_batch, micro_batch)
        for name in ("batch_size", "sampler", "batch_sampler", "shuffle"):
            if name in loader:
                raise ConfigurationError(f"IterableCursor has no {name}: see global_batch")
        self.drop_last = drop_last
        self._size = global_batch
        open_stream = stream if callable(stream) else _Skipping(stream)
        self._batches = _Batches(open_stream, collate_fn, drop_last=drop_last)
        self._loader: DataLoader[Any] = DataLoader(self._batches, batch_size=None, **loader)

    def next_size(self) -> int:
        """Samples in the global batch that was fetched last: it is trained next."""
        return self._size

    def advance(self, batches: int) -> None:
        """Commit so many global batches."""
        super().advance(batches)
        self._set_size(self.global_batch)

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches from the first global batch that is not committed."""
        self._batches.aim(self)
        self._set_size(self.global_batch)
        is_empty = True
        for size, batch in self._loader:
            if is_empty:
                is_empty = False
                self._check_pass(is_empty=False)
            self._set_size(size)
            yield batch
        if is_empty:
            self._check_pass(is_empty=self.position > 0)

    def _set_size(self, size: int) -> None:
        if size != self._size:
            self._size = size
            self._tell_size()


class _Skipping:
    """A stream that can only be read from its beginning."""

    def __init__(self, samples: Iterable[Any]) -> None:
        self._samples = samples

    def __call__(self, epoch: int, start: int) -> Iterator[Any]:
        set_epoch = getattr(self._samples, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        return itertools.islice(iter(self._samples), start, None)


class _Batches(IterableDataset[Any]):
    """Yields (samples in the global batch, this rank's piece of it); runs in workers, too.

    Where it begins lies in shared memory: workers that persist have a copy of this object from
    before. A loader asks nobody before its workers begin, so no lock is needed.
    """

    def __init__(
        self, open_stream: OpenStream, collate_fn: Callable[[list[Any]], Any], *, drop_last: bool
    ) -> None:
        self._open_stream = open_stream
        self._collate = collate_fn
        self._drop_last = drop_last
        self._aim = torch.zeros(6, dtype=torch.int64).share_memory_()

    def aim(self, cursor: BatchCursor) -> None:
        """Begin where a cursor stands."""
        micro = cursor.micro_batch or 0
        numbers = (cursor.epoch, cursor.position, cursor.rank, cursor.world, micro)
        self._aim.copy_(self._aim.new_tensor([*numbers, cursor.global_batch]))

    def __iter__(self) -> Iterator[Any]:
        epoch, position, rank, world, micro, batch = self._aim.tolist()
        cut = BatchCursor(batch, micro or None)
        cut.set_place(rank, world)
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        samples = iter(self._open_stream(epoch, position * batch))
        # Pieces, not batches, go around: the loader takes one item of each worker in turn.
        numbers = itertools.count()
        while block := list(itertools.islice(samples, batch)):
            if len(block) < batch and self._drop_last:
                return
            for piece in cut.pieces(len(block)):
                if next(numbers) % step == first:
                    mine = block[piece.start : piece.stop] or block[:1]
                    yield len(block), self._collate(mine)
