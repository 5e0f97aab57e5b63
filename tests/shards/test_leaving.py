"""A loop over shards that is left early, or runs other backward passes than one for each shard."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from paceline import DistributedDataParallel as DDP
from paceline.errors import ConfigurationError, PeerFailedError
from tests.ddp.checks import Checks, Outcomes, assert_passed

check = Checks()
SHARDS = 3  # on two ranks, rank 1 owns two


class Net(nn.Module):
    """Buffers, which ranks exchange at the end of a round, and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.heads = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 3)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(x)
        return self.heads[0](y), self.heads[1](y)


class Training:
    """A wrapper, its optimizer, and what ranks end with."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.ddp = DDP(self.model, shards=SHARDS, **options)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1, momentum=0.9)
        self.rounds = 0  # begun

    def batch(self) -> Tensor:
        self.rounds += 1
        rows = torch.randn(SHARDS * 2, 4, generator=torch.Generator().manual_seed(self.rounds))
        owned = self.ddp.shard_shares.owned
        return rows[owned.start * 2 : owned.stop * 2]

    def run(self, micro: Tensor) -> None:
        a, b = self.ddp(micro)
        (a.square().sum() + b.square().sum()).backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        for micro in self.ddp.shards(self.batch()):
            self.run(micro)
        self.update()

    @property
    def is_last_rank(self) -> bool:
        return dist.get_rank() == dist.get_world_size() - 1

    def values(self) -> list[Tensor]:
        return [each.detach().clone() for each in self.model.state_dict().values()]


def expected(steps: int) -> list[Tensor]:
    training = Training()
    for _ in range(steps):
        training.step()
    return training.values()


def assert_as_undisturbed(training: Training) -> None:
    assert training.ddp.shard_round == training.rounds
    for found, wanted in zip(training.values(), expected(training.rounds), strict=True):
        assert torch.equal(found, wanted)


def left_by_zip(training: Training) -> None:
    owned = training.ddp.shard_shares.owned
    for _, micro in zip(owned, training.ddp.shards(training.batch()), strict=False):
        training.run(micro)


def left_by_break(training: Training) -> None:
    owned = training.ddp.shard_shares.owned
    for number, micro in enumerate(training.ddp.shards(training.batch()), 1):
        training.run(micro)
        if number == len(owned):
            break


def left_by_an_exception(training: Training) -> None:
    """Whose traceback keeps the generator for a while."""
    with contextlib.suppress(KeyError):
        for number, micro in enumerate(training.ddp.shards(training.batch()), 1):
            training.run(micro)
            if number == len(training.ddp.shard_shares.owned):
                raise KeyError


def left_and_kept(training: Training, kept: list[Iterator[Any]]) -> None:
    loop = training.ddp.shards(training.batch())
    kept.append(loop)
    for _ in training.ddp.shard_shares.owned:
        training.run(next(loop))


@check
def a_loop_that_is_left_at_its_last_shard() -> None:
    training, kept = Training(), []
    for leave in (left_by_zip, left_by_break, left_by_an_exception):
        leave(training)
        training.update()
        assert_as_undisturbed(training)
    left_and_kept(training, kept)
    training.update()
    assert_as_undisturbed(training)
    assert not list(kept[0])  # it ends quietly, whatever was done meanwhile
    assert_as_undisturbed(training)
    training.step()
    assert_as_undisturbed(training)


@check
def ranks_that_leave_in_different_ways() -> None:
    training = Training()
    for _ in range(2):
        leave = left_by_zip if training.is_last_rank else None
        if leave is None:
            training.step()
        else:
            leave(training)
            training.update()
    left_by_break(training)
    with torch.no_grad():
        training.ddp.eval()
        training.ddp(torch.ones(2, 4))  # with the buffers of all shards
        training.ddp.train()
    training.update()
    assert_as_undisturbed(training)


@check
def rounds_that_accumulate_and_are_left() -> None:
    training, other = Training(), Training()
    for each, leave in ((training, left_by_break), (other, None)):
        for _ in range(3):
            if leave:
                leave(each)
            else:
                for micro in each.ddp.shards(each.batch()):
                    each.run(micro)
        each.update()
    assert all(map(torch.equal, training.values(), other.values()))


@check
def an_update_inside_of_the_loop() -> None:
    training = Training()

    def update_inside() -> None:
        for micro in training.ddp.shards(training.batch()):
            a, _ = training.ddp(micro)
            training.optimizer.step()
            a.sum().backward()

    before = training.values()[3]
    with pytest.raises(ConfigurationError, match=r"optimizer.step\(\) before the loop over shards"):
        update_inside()
    assert torch.equal(training.values()[3], before)
    training.rounds = 0
    with pytest.raises(PeerFailedError, match="did not run to its end"):
        training.step()
    training.rounds = 0
    training.step()
    assert_as_undisturbed(training)


@check
def a_loop_that_is_left_before_its_last_backward() -> None:
    """All ranks hear of it at the update of the one that has left, and nothing is changed."""
    training = Training()
    loop = training.ddp.shards(training.batch())
    before = training.values()
    if training.is_last_rank:
        training.run(next(loop))  # one of two
        loop.close()
        with pytest.raises(PeerFailedError, match="its loop over shards 1 to 2 did not run"):
            training.update()
    else:
        with pytest.raises(PeerFailedError, match="its loop over shards 1 to 2 did not run"):
            training.run(next(loop))
        loop.close()
    assert all(map(torch.equal, before, training.values()))  # buffers, too
    training.rounds = 0
    training.step()
    assert_as_undisturbed(training)


def run_twice(training: Training, way: str) -> None:
    """Two backward passes of the same loss, or one for each head."""
    losses = [each.square().sum() for each in training.ddp(training_input(training))]
    if way == "heads":
        losses[0].backward(retain_graph=True)
        losses[1].backward()
    else:
        sum(losses).backward(retain_graph=True)
        sum(losses).backward()


def training_input(training: Training) -> Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(training.rounds))


@check.each("same", "heads")
def two_backward_passes_of_a_shard_that_is_not_the_last(way: str) -> None:
    """Its rank names it, the others are told at its next step, and nothing is changed."""
    training = Training()

    def twice_in_the_first() -> None:
        for position, micro in enumerate(training.ddp.shards(training.batch())):
            if training.is_last_rank and not position:
                run_twice(training, way)
            else:
                training.run(micro)

    if training.is_last_rank:
        match = "shard 1: the loop over shards has run 2 backward passes"
        with pytest.raises(ConfigurationError, match=match):
            twice_in_the_first()
        with pytest.raises(PeerFailedError):
            training.update()
    else:
        with pytest.raises(PeerFailedError):
            twice_in_the_first()
    training.rounds = 0
    training.step()
    assert_as_undisturbed(training)


@check.each(False, True)
def two_backward_passes_of_the_last_shard(is_one_rank_alone: bool) -> None:
    """The first has averaged the gradients of all; the second raises, and changes nothing."""
    training = Training()

    def twice_in_the_last() -> None:
        for micro in training.ddp.shards(training.batch()):
            loss = sum(each.square().sum() for each in training.ddp(micro))
            loss.backward(retain_graph=True)
            is_last = training.ddp.require_backward_grad_sync
            if is_last and (training.is_last_rank or not is_one_rank_alone):
                loss.backward()

    if training.is_last_rank or not is_one_rank_alone:
        with pytest.raises(ConfigurationError, match="a second backward, after the gradients"):
            twice_in_the_last()
    else:
        twice_in_the_last()
    training.update()
    assert_as_undisturbed(training)


@check.each(0, -1)
def no_backward_in_a_shard(number: int) -> None:
    training = Training()

    def forget_one() -> None:
        owned = training.ddp.shard_shares.owned
        for position, micro in enumerate(training.ddp.shards(training.batch())):
            if training.is_last_rank and position == number % len(owned):
                training.ddp(micro)
            else:
                training.run(micro)

    expected_error = ConfigurationError if training.is_last_rank else PeerFailedError
    match = "has run no backward" if training.is_last_rank else "did not run to its end"
    with pytest.raises(expected_error, match=match):
        forget_one()
    if training.is_last_rank:
        with pytest.raises(PeerFailedError):
            training.update()
    training.optimizer.zero_grad()
    training.rounds = 0
    training.step()
    assert_as_undisturbed(training)


@check
def a_backward_around_the_wrapper() -> None:
    """After the step of the last shard it would spoil what was averaged."""
    training = Training()

    def run_around() -> None:
        for micro in training.ddp.shards(training.batch()):
            training.run(micro)
            if training.ddp.require_backward_grad_sync:
                training.model(micro)[0].sum().backward()

    with pytest.raises(ConfigurationError, match="has run 2 backward passes"):
        run_around()
    training.optimizer.zero_grad()
    training.step()
    assert training.ddp.shard_round == 2


class Checkpointed(nn.Module):
    """Reentrant checkpointing runs backward passes inside of the one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


@check
def what_is_one_backward() -> None:
    """Checkpointing, and the gradient of an input, which brings no parameter's."""
    torch.manual_seed(0)
    ddp = DDP(Checkpointed(), shards=SHARDS)
    for _ in range(2):
        for micro in ddp.shards(torch.ones(2 * len(ddp.shard_shares.owned), 4)):
            x = micro.clone().requires_grad_()
            loss = F.mse_loss(ddp(x), micro)
            loss.backward()
            torch.autograd.grad(micro.requires_grad_().square().sum(), micro)
    assert ddp.shard_round == 2


class Branch(nn.Module):
    """Uses its layer for some inputs only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x[0, 0].item() > 0 else x * 2


@check
def a_shard_that_uses_nothing() -> None:
    ddp = DDP(Branch(), shards=4, find_unused_parameters=True)
    for number, micro in enumerate(ddp.shards(torch.ones(4, 4))):
        ddp((micro if number else -micro).requires_grad_()).sum().backward()
    assert ddp.shard_round == 1


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return check.run(2)


@pytest.mark.parametrize("name", check.names)
def test_check(outcomes: Outcomes, name: str) -> None:
    assert_passed(outcomes, name)
