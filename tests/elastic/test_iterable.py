"""A stream cut into global batches: every sample exactly once, whatever ranks and workers do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from paceline.elastic import IterableCursor, State
from paceline.errors import ConfigurationError

SAMPLES = 47
WORLDS = [(3, 2), (2, 1), (4, 1), (1, 1), (3, 2)]  # ranks, and how many batches they commit


def open_stream(epoch: int, start: int) -> Iterator[int]:
    return iter(range(1000 * epoch + start, 1000 * epoch + SAMPLES))


class Stream(IterableDataset[int]):
    """Can only be read from its beginning."""

    def __iter__(self) -> Iterator[int]:
        return open_stream(self.epoch, 0)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "micro-batches": {"micro_batch": 2},
    "read from its beginning": {},
    "workers and micro-batches": {"num_workers": 2, "micro_batch": 1},
    "persistent": {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3},
}


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("way", WAYS)
def test_every_sample_exactly_once(way: str) -> None:
    """Ranks come and go in the middle of an epoch; each iterator has prefetched more."""
    stream = Stream() if "beginning" in way else open_stream
    cursor = IterableCursor(stream, 8, **WAYS[way])
    cursor.set_epoch(2)
    seen: list[int] = []
    schedule = iter(WORLDS * 2)
    while len(seen) < SAMPLES:
        world, batches = next(schedule)
        parts: list[list[int]] = [[] for _ in range(batches)]
        for rank in range(world):
            cursor.set_place(rank, world)
            items = iter(cursor)
            for number in range(batches):
                if number and 8 * (cursor.position + number) >= SAMPLES:
                    break
                parts[number] += take_batch(cursor, items)
        for part in parts:
            if part:
                seen += part
                cursor.advance(1)
    assert seen == list(range(2000, 2000 + SAMPLES))
    assert list(cursor) == []
    assert cursor.state_dict()["position"] == 6


def take_batch(cursor: IterableCursor, items: Iterator[torch.Tensor]) -> list[int]:
    """This rank's samples of one global batch."""
    found: list[int] = []
    first = next(items)
    pieces = cursor.pieces(cursor.next_size())
    for number, piece in enumerate(pieces):
        part = first if number == 0 else next(items)
        found += part.tolist()[: len(piece)]
    return found


def test_the_last_batch_is_weighed_for_what_it_is() -> None:
    cursor = IterableCursor(open_stream, 8)
    state = State(data=cursor)
    weights = []
    cursor.set_place(2, 3)
    for _ in cursor:
        weights.append((cursor.weight(), cursor.is_even()))
        state.sampler.advance(1)
    assert weights == [(2, False)] * 5 + [(2, False)]
    assert cursor.next_size() == 8  # and forgotten again
    cursor = IterableCursor(open_stream, 8, drop_last=True)
    assert len(list(cursor)) == 5
    state.close()


def test_resumed_at_another_world_size() -> None:
    cursor = IterableCursor(open_stream, 8)
    cursor.advance(3)
    other = IterableCursor(open_stream, 8)
    other.load_state_dict(cursor.state_dict())
    other.set_place(1, 2)
    assert next(iter(other)).tolist() == [28, 29, 30, 31]


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="has no batch_size"):
        IterableCursor(open_stream, 8, batch_size=4)
    with pytest.raises(ConfigurationError, match="holds one"):
        State(a=IterableCursor(open_stream, 8), b=IterableCursor(open_stream, 8))
