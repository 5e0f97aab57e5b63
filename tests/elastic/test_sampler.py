"""Global batches: the same whatever the number of ranks, every sample exactly once."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline import DistributedDataParallel as DDP
from paceline.elastic import DistributedSampler, State
from paceline.errors import ConfigurationError
from paceline.testing import run_ranks


@given(
    samples=st.integers(8, 120),
    batch=st.integers(8, 16),  # half of one is enough for four ranks
    worlds=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=8),
    shuffle=st.booleans(),
)
def test_every_sample_exactly_once_over_any_schedule_of_worlds(
    samples: int, batch: int, worlds: list[tuple[int, int]], shuffle: bool
) -> None:
    sampler = DistributedSampler(samples, batch, shuffle=shuffle, seed=5)
    undisturbed = list(sampler)
    seen: list[list[int]] = []
    schedule = [world for world, steps in worlds for _ in range(steps)]
    while len(sampler):
        world = schedule[len(seen) % len(schedule)]
        parts = []
        for rank in range(world):
            sampler.set_place(rank, world)
            parts.append(next(iter(sampler)))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        seen.append([index for part in parts for index in part])
        sampler.advance(1)
    assert seen == undisturbed
    assert sorted(index for part in seen for index in part) == list(range(samples))


def test_only_a_commit_moves_the_position() -> None:
    sampler = DistributedSampler(40, 10)
    first = list(sampler)
    assert list(sampler) == first
    sampler.advance(2)
    assert list(sampler) == first[2:]


def test_its_state_is_good_for_another_world() -> None:
    sampler = DistributedSampler(40, 8, seed=2)
    sampler.set_epoch(3)
    sampler.advance(2)
    other = DistributedSampler(40, 8)
    other.load_state_dict(sampler.state_dict())
    assert list(other) == list(sampler)
    other.set_epoch(4)
    assert other.position == 0


def test_a_pass_without_an_epoch_of_its_own_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """But not one that begins again where an epoch had just ended."""
    sampler = DistributedSampler(8, 4)
    assert len(list(sampler)) == 2
    sampler.advance(2)
    sampler.set_epoch(0)
    assert list(sampler) == []
    assert not caplog.records
    assert list(sampler) == []
    assert "call set_epoch() with the next number" in caplog.text


def test_what_is_left_over() -> None:
    assert [len(part) for part in DistributedSampler(10, 4)] == [4, 4, 2]
    assert [len(part) for part in DistributedSampler(9, 4)] == [4, 5]
    assert [len(part) for part in DistributedSampler(9, 4, drop_last=True)] == [4, 4]


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="needs samples"):
        DistributedSampler(0, 4)
    with pytest.raises(ConfigurationError, match="global_batch is an int"):
        DistributedSampler(4, 0)
    with pytest.raises(ConfigurationError, match="micro_batch is an int"):
        DistributedSampler(4, 4, micro_batch=-1)


def test_a_state_of_other_data_is_refused() -> None:
    sampler = DistributedSampler(40, 8)
    sampler.advance(1)
    with pytest.raises(ConfigurationError, match="had 40 samples and has 41 now"):
        DistributedSampler(41, 8).load_state_dict(sampler.state_dict())
    with pytest.raises(ConfigurationError, match="global batch 1 of 8 samples"):
        DistributedSampler(40, 10).load_state_dict(sampler.state_dict())


@given(
    samples=st.integers(1, 60),
    batch=st.integers(1, 16),
    micro=st.integers(1, 8),
    worlds=st.lists(st.integers(1, 6), min_size=1, max_size=5),
)
def test_micro_batches_are_the_whole_batch(
    samples: int, batch: int, micro: int, worlds: list[int]
) -> None:
    """Also with fewer samples than ranks, who then get one that counts nothing."""
    sampler = DistributedSampler(samples, batch, micro_batch=micro)
    undisturbed = list(DistributedSampler(samples, batch))
    while sampler.position < sampler.batches:
        world = worlds[sampler.position % len(worlds)]
        whole, counts, weights = [], set(), 0
        for rank in range(world):
            sampler.set_place(rank, world)
            pieces = sampler.pieces(sampler.next_size())
            got = [part for part, _ in zip(sampler, pieces, strict=False)]
            assert all(1 <= len(part) <= micro for part in got)
            whole += [index for part, piece in zip(got, pieces, strict=True)
                      for index in part[: len(piece)]]  # fmt: skip
            counts.add(len(got))
            weights += sampler.weight()
            assert len(list(sampler)) == len(sampler)
        assert len(counts) == 1
        assert weights == len(whole)
        assert whole == undisturbed[sampler.position]
        sampler.advance(1)


def train(global_batch: int, micro_batch: int | None) -> list[float]:
    """Two steps of one global batch each; the parameters after them."""
    torch.manual_seed(0)
    data = torch.randn(2 * global_batch, 5, dtype=torch.float64)
    ddp = DDP(torch.nn.Linear(5, 3).double())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.3, momentum=0.5)
    sampler = DistributedSampler(len(data), global_batch, micro_batch=micro_batch)
    state = State(model=ddp, optimizer=optimizer, sampler=sampler, step=0)
    for indices in sampler:
        with state.micro_batch() as micro:
            micro.scale(ddp(data[indices]).square().mean()).backward()
        if micro.is_last:
            optimizer.step()
            optimizer.zero_grad()
            state.step += 1
            state.commit()
    assert state.step == sampler.position == 2
    state.close()
    return [float(v) for p in ddp.parameters() for v in p.detach().flatten()]


@pytest.mark.parametrize(
    ("batch", "micro"),
    [
        (13, 3),
        (2, None),
        *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((12, 2), (7, 1), (1, 1))),
    ],
)
def test_the_step_is_that_of_one_process(batch: int, micro: int | None) -> None:
    """Split, accumulated and weighted; also where some ranks have no sample at all."""
    [expected] = run_ranks(1, train, batch, None)
    for found in run_ranks(3, train, batch, micro):
        assert found == pytest.approx(expected, rel=1e-12)


def test_a_part_of_a_global_batch_is_not_committed() -> None:
    sampler = DistributedSampler(8, 8, micro_batch=4)
    state = State(sampler=sampler)
    with pytest.raises(ConfigurationError, match="0 of 2 micro-batches"):
        state.commit()
    with state.micro_batch() as micro:
        assert (micro.samples, micro.share, micro.is_last) == (4, 8, False)
    with pytest.raises(ConfigurationError, match="1 of 2 micro-batches"):
        state.commit()
    state.put_back()
    for is_last in (False, True):
        with state.micro_batch() as micro:
            assert micro.is_last is is_last
    with pytest.raises(ConfigurationError, match="all 2 micro-batches"), state.micro_batch():
        pass
    state.commit()
    assert sampler.position == 1


def reduce_and_commit(models: int, reductions: int) -> tuple[int, list[str]]:
    """Where the sampler stands after two commits, and what was said."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paceline.elastic").addHandler(handler)
    wrapped = {f"model{number}": DDP(torch.nn.Linear(2, 1)) for number in range(models)}
    sampler = DistributedSampler(40, 4)
    state = State(sampler=sampler, **wrapped)
    for _ in range(2):
        for _ in range(reductions):
            for ddp in wrapped.values():
                ddp(torch.ones(1, 2)).sum().backward()
        state.commit()
    state.close()
    return sampler.position, lines


def test_batches_of_a_step_where_reductions_tell() -> None:
    """Accumulated without no_sync: a line says what was counted, once."""
    [(position, lines)] = run_ranks(1, reduce_and_commit, 1, 2)
    assert position == 4
    assert len(lines) == 1
    assert "say so: state.commit(batches=1)" in lines[0]


@pytest.mark.parametrize("models", [0, 2])
def test_a_commit_is_a_batch_where_they_do_not(models: int) -> None:
    """A GAN reduces one of its models several times for a batch."""
    assert run_ranks(1, reduce_and_commit, models, 2) == [(2, [])]


def test_each_batch_is_weighed_for_what_it_is() -> None:
    """The last of an epoch may be uneven; the first of the next one is not."""

    def on_rank() -> list[float | None]:
        ddp = DDP(torch.nn.Linear(1, 1))
        sampler = DistributedSampler(21, 8)
        state = State(model=ddp, sampler=sampler)
        state.take_place(0, 2)
        assert ddp.reducer is not None
        found = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for indices in sampler:
                found.append(ddp.reducer.runner.weight)
                assert found[-1] in (None, len(indices))
                state.commit(batches=1)
        state.put_back()
        state.close()
        return found

    assert run_ranks(1, on_rank) == [[None, None, 3.0] * 2]
