"""Models, shards, ranks, bucket sizes and changes of membership, drawn at random.

Every rank draws the same examples and agrees with the others upon whether one holds, so that all of
them shrink a counter-example together. An example trains once alone, on one rank, and once with
ranks that change: any may leave, join, or come back with another number. Who joins copies the state
of a member, as an elastic job has it. Steps may be lost, as they are when a rank dies: all go back
to the state that was committed. That ranks really die: ``test_random_jobs.py``.
"""

from __future__ import annotations

import copy
import functools
import warnings
from dataclasses import dataclass
from typing import Any

import hypothesis
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import paceline
from paceline import DistributedDataParallel as DDP
from paceline.testing import run_ranks
from tests.examples import draw_seed
from tests.shards.drawn import Drawn, trainings
from tests.shards.one_rank import IS_LONG
from tests.shards.trainings import Data, digest, run_round

WORLD = 8 if IS_LONG else 4


@dataclass(frozen=True)
class Example:
    """A training, and how its membership changes.

    Attributes:
        drawn: The training.
        segments: Who the ranks are, how many steps they train, and how many more that are lost.
    """

    drawn: Drawn
    segments: tuple[tuple[tuple[int, ...], int, int], ...]


@st.composite
def examples(draw: st.DrawFn) -> Example:
    drawn = draw(trainings())
    ranks = st.sets(st.integers(0, WORLD - 1), min_size=1, max_size=min(WORLD, drawn.shards))
    segment = st.tuples(ranks.map(sorted).map(tuple), st.integers(1, 2), st.integers(0, 1))
    return Example(drawn, tuple(draw(st.lists(segment, min_size=1, max_size=3))))


class Training:
    """One training on this rank."""

    def __init__(self, drawn: Drawn, group: Any) -> None:
        self.case = drawn.case()
        self.model = self.case.model()
        self.ddp = DDP(
            self.model,
            process_group=group,
            shards=drawn.shards,
            transport=drawn.transport,
            **self.case.ddp,
        )
        self.optimizer = self.case.optimizers(self.model)[0]
        data = Data(drawn.shards * drawn.micro * 3)
        self.loader = paceline.ShardLoader(data, self.ddp, drawn.micro)

    def train(self, steps: int) -> None:
        rounds = steps * self.case.accumulate
        while rounds:
            for batch in self.loader:
                run_round(self.case, self.ddp, batch)
                rounds -= 1
                if self.ddp.shard_round % self.case.accumulate == 0:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                if not rounds:
                    break
            if self.loader.position == self.loader.rounds:
                self.loader.set_epoch(self.loader.epoch + 1)
            self.loader.load_state_dict(self.loader.state_dict())  # go on there

    def state(self) -> list[Any]:
        """Return a copy of what a member has."""
        parts = (self.model, self.optimizer, self.loader)
        return copy.deepcopy([*(part.state_dict() for part in parts), self.ddp.shard_round])

    def take_state(self, state: list[Any], source: int) -> None:
        """Copy a rank's state to all, members or not."""
        dist.broadcast_object_list(state, src=source)
        self.model.load_state_dict(state[0])
        self.optimizer.load_state_dict(state[1])
        self.loader.load_state_dict(state[2])
        self.ddp.shard_round = state[3]


def run_examples(count: int, seed: int) -> int:
    """Try so many examples on this rank; return how many there were. Ranks draw the same."""
    warnings.simplefilter("ignore")
    rank = dist.get_rank()
    alone = [dist.new_group([each]) for each in range(WORLD)][rank]
    group_of = functools.cache(lambda ranks: dist.new_group(list(ranks)))
    tried = []

    @hypothesis.seed(seed)
    @settings(
        max_examples=count,
        derandomize=False,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(examples())
    def ends_as_on_one_rank(example: Example) -> None:
        tried.append(example)
        expected = Training(example.drawn, alone)
        expected.train(sum(steps for _, steps, _ in example.segments))
        found = Training(example.drawn, alone)
        for ranks, steps, lost in example.segments:
            group = group_of(ranks)  # all ranks make it together
            if rank in ranks:
                found.ddp._update_process_group(group)
                found.train(steps)
            committed = found.state()
            if rank in ranks:
                found.train(lost)
            found.take_state(committed, ranks[-1])
        is_wrong = digest(found.model, [found.optimizer]) != digest(
            expected.model, [expected.optimizer]
        )
        wrong = torch.tensor(int(is_wrong))
        dist.all_reduce(wrong)
        assert not wrong, (seed, example)

    ends_as_on_one_rank()
    return len(tried)


MANY = 600 if IS_LONG else 60


@pytest.mark.parametrize(
    "count", [8, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(4000)])]
)
def test_any_schedule_ends_with_the_bits_of_one_rank(count: int) -> None:
    assert min(run_ranks(WORLD, run_examples, count, draw_seed(), timeout_s=3800)) >= count
