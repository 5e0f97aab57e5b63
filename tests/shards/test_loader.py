"""Where a ``ShardLoader`` stands: what is saved after a step goes on with the next one."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from paceline import ShardLoader
from paceline.errors import ConfigurationError
from paceline.shards.streams import OwnStreams, seed_all
from paceline.shards.tree import Shares

SHARDS, MICRO, SAMPLES = 4, 2, 40  # 5 rounds of 8


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class Place:
    """What a loader wants to know of a wrapper."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.shard_shares = Shares(SHARDS, rank, world)


def loader_on(rank: int = 0, world: int = 1, **options: Any) -> ShardLoader:
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more than there are cores
    return ShardLoader(Numbers(), Place(rank, world), MICRO, **options)


def round_of(batch: Any) -> list[int]:
    return [sample for micro in batch for sample in micro.tolist()]


def train(loader: ShardLoader, epochs: int, stop_after: int = -1) -> tuple[list[Any], Any]:
    """Train as users do; save after each step, in the loop. Return samples and the last state."""
    seen: list[Any] = []
    saved: Any = None
    for epoch in range(loader.epoch, epochs):
        loader.set_epoch(epoch)
        for batch in (rounds := iter(loader)):
            seen.append((epoch, round_of(batch)))
            saved = loader.state_dict()
            if len(seen) == stop_after:
                list(rounds)  # what workers have loaded ahead
                return seen, saved
    return seen, saved


@pytest.mark.parametrize(("steps", "workers"), [(1, 0), (3, 0), (3, 2), (5, 0), (7, 0), (10, 0)])
def test_a_plain_loop_goes_on_where_it_was_saved(steps: int, workers: int) -> None:
    options = {"prefetch_factor": 4} if workers else {}
    expected, _ = train(loader_on(), 2)
    assert len({tuple(each) for _, each in expected}) == 10
    begun, saved = train(loader_on(num_workers=workers, **options), 2, steps)
    other = loader_on(seed=5, num_workers=workers, **options)
    other.load_state_dict(saved)
    assert len(other) == 5 * (other.epoch + 1) - steps
    assert begun + train(other, 2)[0] == expected


def test_at_another_number_of_ranks() -> None:
    expected, _ = train(loader_on(), 2)
    _, saved = train(loader_on(), 2, 4)
    rests = []
    for rank in range(3):
        loader = loader_on(rank, 3)
        loader.load_state_dict(saved)
        rests.append(train(loader, 2)[0])
    for whole, *parts in zip(expected[4:], *rests, strict=True):
        assert whole[1] == [sample for _, part in parts for sample in part]


def test_an_epoch_begins_anew_unless_it_is_told_to_go_on() -> None:
    loader = loader_on()
    first = [round_of(batch) for batch in loader]
    assert [round_of(batch) for batch in loader] == first  # without set_epoch
    for _ in range(2):
        assert round_of(next(iter(loader))) == first[0]  # a glance at the data
    assert len(loader) == 5
    loader.load_state_dict({"epoch": 0, "position": 2, "seed": 0})
    loader.advance(1)
    loader.set_epoch(0)
    assert len(loader) == 2
    assert [round_of(batch) for batch in loader] == first[3:]


def test_only_commits_move_it_in_an_elastic_state() -> None:
    from paceline import elastic

    loader = loader_on()
    state = elastic.State(loader=loader, step=0)
    rounds = iter(loader)
    next(rounds), next(rounds)
    assert loader.position == 0
    state.commit(batches=2)
    next(rounds)
    assert loader.position == 2
    assert len(list(loader)) == 3


def test_batches_come_in_order() -> None:
    with pytest.raises(ConfigurationError, match="in_order"):
        loader_on(num_workers=2, in_order=False)


class Threads(Numbers):
    def __getitem__(self, index: int) -> int:
        return torch.get_num_threads()


def test_samples_are_loaded_by_one_thread() -> None:
    """As in torch's workers, so that augmentation has the same bits in them and in the rank."""
    torch.set_num_threads(3)
    try:
        for batch in ShardLoader(Threads(), Place(), MICRO):
            assert set(round_of(batch)) == {1}
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)


class Device:
    """An accelerator that counts what is drawn."""

    def __init__(self) -> None:
        self.state = 7

    def is_initialized(self) -> bool:
        return True

    def get_rng_state_all(self) -> list[int]:
        return [self.state]

    def set_rng_state_all(self, states: list[int]) -> None:
        (self.state,) = states

    def manual_seed_all(self, seed: int) -> None:
        self.state = seed


def test_the_streams_of_any_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    own = OwnStreams()
    seed_all(3)
    assert device.state == 3
    own.put_back()
    assert device.state == 7
