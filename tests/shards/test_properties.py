"""Models, shards, ranks, bucket sizes and changes of membership, drawn at random.

Every rank draws the same examples and agrees with the others upon whether one holds, so that all of
them shrink a counter-example together. An example trains once alone, on one rank, and once with
ranks that change: any may leave, join, or come back with another number. Who joins copies the state
of a member, as an elastic job has it. Steps may be lost, as they are when a rank dies: all go back
to the state that was committed. That ranks really die: ``test_elastic.py``.
"""

from __future__ import annotations

import copy
import functools
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import paceline
from paceline import DistributedDataParallel as DDP
from paceline.testing import run_ranks
from tests.shards.trainings import Data, digest

WORLD = 4


@dataclass(frozen=True)
class Example:
    """A training, and how its membership changes.

    Attributes:
        layers: What the model is made of.
        shards: How many.
        micro: Samples in each.
        cap: Of a bucket, in MiB.
        optimizer: Its name.
        rounds: For each step.
        is_weighted: Shards have weights.
        transport: What gradients travel over.
        segments: Who the ranks are, how many steps they train, and how many more that are lost.
    """

    layers: tuple[str, ...]
    shards: int
    micro: int
    cap: float
    optimizer: str
    rounds: int
    is_weighted: bool
    transport: str
    segments: tuple[tuple[tuple[int, ...], int, int], ...]


class Model(nn.Module):
    """Some layers in a row."""

    def __init__(self, layers: tuple[str, ...]) -> None:
        super().__init__()
        self.kinds = layers
        made: list[nn.Module] = []
        width = 16
        for index, kind in enumerate(layers):
            if kind in ("linear", "maybe"):
                made.append(nn.Linear(width, width := 5 + 3 * index))
            elif kind == "norm":
                made.append(nn.BatchNorm1d(width))
            elif kind == "sync":
                made.append(paceline.nn.SyncBatchNorm(width))
            elif kind == "words":
                made.append(nn.Embedding(30, width, sparse=True))
            else:
                made.append(nn.Dropout(0.2))
        self.layers = nn.ModuleList(made)
        self.last = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        choice = bool(x[0, 0] > 0)
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            if kind == "words":
                x = x + layer((x[:, 0].abs() * 20).long() % 30)
            elif kind == "maybe" and choice:
                x = F.pad(x, (0, layer.out_features - x.shape[1])) if (
                    layer.out_features >= x.shape[1]
                ) else x[:, : layer.out_features]  # fmt: skip
            else:
                x = torch.tanh(layer(x))
        return self.last(x)


@st.composite
def examples(draw: st.DrawFn) -> Example:
    shards = draw(st.integers(1, 9))
    kinds = st.sampled_from(["linear", "norm", "sync", "dropout", "words", "maybe"])
    ranks = st.sets(st.integers(0, WORLD - 1), min_size=1, max_size=min(WORLD, shards))
    segment = st.tuples(ranks.map(sorted).map(tuple), st.integers(1, 2), st.integers(0, 1))
    return Example(
        layers=tuple(draw(st.lists(kinds, min_size=1, max_size=4))),
        shards=shards,
        micro=draw(st.integers(2, 3)),
        cap=draw(st.sampled_from([0.0001, 0.001, 25.0])),
        optimizer=draw(st.sampled_from(["SGD", "Adagrad"])),
        rounds=draw(st.integers(1, 2)),
        is_weighted=draw(st.booleans()),
        transport=draw(st.sampled_from(["auto", "c10d"])),
        segments=tuple(draw(st.lists(segment, min_size=1, max_size=3))),
    )


class Training:
    """One training on this rank."""

    def __init__(self, example: Example, group: Any) -> None:
        torch.manual_seed(0)
        self.example = example
        self.model = Model(example.layers)
        self.ddp = DDP(
            self.model,
            process_group=group,
            shards=example.shards,
            bucket_cap_mb=example.cap,
            find_unused_parameters="maybe" in example.layers,
            transport=example.transport,
        )
        self.optimizer = getattr(torch.optim, example.optimizer)(self.model.parameters(), lr=0.05)
        data = Data(example.shards * example.micro * 3)
        self.loader = paceline.ShardLoader(data, self.ddp, example.micro)

    def train(self, steps: int) -> None:
        rounds = steps * self.example.rounds
        while rounds:
            for batch in self.loader:
                self._run(batch)
                rounds -= 1
                if self.ddp.shard_round % self.example.rounds == 0:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                if not rounds:
                    break
            if self.loader.position == self.loader.rounds:
                self.loader.set_epoch(self.loader.epoch + 1)
            self.loader.load_state_dict(self.loader.state_dict())  # go on there

    def _run(self, batch: Any) -> None:
        if "sync" in self.example.layers:
            self.ddp.run_shards(batch, self._run_shard)
            return
        owned = self.ddp.shard_shares.owned
        for shard, (x, y) in zip(owned, self.ddp.shards(batch), strict=True):
            if self.example.is_weighted:
                with self.ddp.weighted((shard * 5) % 4):
                    F.mse_loss(self.ddp(x), y).backward()
            else:
                self._run_shard((x, y))

    def _run_shard(self, micro: Any) -> None:
        F.mse_loss(self.ddp(micro[0]), micro[1]).backward()

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


def run_examples(count: int) -> int:
    """Try so many examples on this rank; return how many there were."""
    warnings.simplefilter("ignore")
    rank = dist.get_rank()
    alone = [dist.new_group([each]) for each in range(WORLD)][rank]
    group_of = functools.cache(lambda ranks: dist.new_group(list(ranks)))
    tried = []

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(examples())
    def ends_as_on_one_rank(example: Example) -> None:
        tried.append(example)
        expected = Training(example, alone)
        expected.train(sum(steps for _, steps, _ in example.segments))
        found = Training(example, alone)
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
        assert not wrong, example

    ends_as_on_one_rank()
    return len(tried)


@pytest.mark.parametrize(
    "count", [8, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(400)])]
)
def test_any_schedule_ends_with_the_bits_of_one_rank(count: int) -> None:
    assert min(run_ranks(WORLD, run_examples, count, timeout_s=380)) >= count
