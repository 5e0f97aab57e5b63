"""Shards that run in turns: what they cannot be combined with, and errors in the middle."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline import DistributedDataParallel as DDP
from paceline.errors import ConfigurationError, PeerFailedError
from tests.ddp.checks import Checks, Outcomes, assert_passed
from tests.shards.test_errors import rows, small, step

check = Checks()
WORLD = 2


def synced() -> Any:
    torch.manual_seed(0)
    first, second = paceline.nn.SyncBatchNorm(4), paceline.nn.SyncBatchNorm(3)
    return DDP(nn.Sequential(first, nn.Linear(4, 3), second), shards=3)  # rank 1 owns two


def run_all(ddp: Any, function: Any = None) -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    batch = torch.randn(rows(ddp).shape, generator=generator)
    ddp.run_shards(batch, function or (lambda micro: ddp(micro).square().sum().backward()))


@check
def a_loop_over_shards_that_need_each_other() -> None:
    ddp = synced()
    with pytest.raises(ConfigurationError, match=r"ddp.run_shards\(batch, function\), which runs"):
        step(ddp)
    ddp.eval()
    step(ddp)
    ddp.train()
    run_all(ddp)
    with torch.no_grad():
        ddp(torch.ones(2, 4))  # an evaluation, over the ranks
    assert ddp.shard_round == 2


@check
def shards_in_turns_with_hooks_on_gradients() -> None:
    ddp = synced()
    handles = [p.register_post_accumulate_grad_hook(lambda _: None) for p in ddp.parameters()]
    with pytest.raises(ConfigurationError, match="hooks on parameters' gradients and a SyncBatch"):
        run_all(ddp)
    for handle in handles:
        handle.remove()
    run_all(ddp)


@check
def shards_in_turns_that_are_weighted() -> None:
    ddp = synced()

    def weigh(micro: torch.Tensor) -> None:
        with ddp.weighted(2):
            ddp(micro).sum().backward()

    with pytest.raises(ConfigurationError, match=r"weighted\(n\) and a SyncBatchNorm over"):
        run_all(ddp, weigh)
    run_all(ddp)


@check
def an_exception_in_one_turn_is_told_to_all_at_once() -> None:
    ddp = synced()
    for place in ("before", "between", "after"):
        calls = []

        def fail(micro: torch.Tensor, place: str = place, calls: list[int] = calls) -> None:
            calls.append(1)
            fails = dist.get_rank() == 1 and len(calls) == 2
            if fails and place == "before":
                raise KeyError("mine")
            loss = ddp(micro).square().sum()
            if fails and place == "between":
                raise KeyError("mine")
            loss.backward()
            if fails:
                raise KeyError("mine")

        expected = KeyError if dist.get_rank() == 1 else PeerFailedError
        with pytest.raises(expected, match=r"mine|Rank 1 could not run its shards to their end"):
            run_all(ddp, fail)
        assert all(p.grad is None for p in ddp.parameters())
    run_all(ddp)
    assert ddp.shard_round == 1


@check
def shards_of_one_rank_that_run_other_layers() -> None:
    ddp = synced()

    def skip(micro: torch.Tensor) -> None:
        if dist.get_rank() == 1:
            ddp.module[0].eval()
        try:
            ddp(micro).square().sum().backward()
        finally:
            ddp.module[0].train()

    with pytest.raises(ConfigurationError, match=r"is at the forward of [02], with .+ elsewhere"):
        run_all(ddp, skip)
    run_all(ddp)


@check
def a_shard_in_turns_without_a_backward() -> None:
    ddp = synced()

    def forget(micro: torch.Tensor) -> None:
        ddp(micro)

    def repeat(micro: torch.Tensor) -> None:
        ddp(micro)
        ddp(micro).sum().backward()

    with pytest.raises(ConfigurationError, match=r"shard [01]: it has brought no gradient"):
        run_all(ddp, forget)
    with pytest.raises(ConfigurationError, match="has run 2 forwards with gradients"):
        run_all(ddp, repeat)
    run_all(ddp)


@check
def what_a_function_returns() -> None:
    ddp, plain = synced(), DDP(small(), shards=3)

    def loss_of(wrapper: Any, micro: torch.Tensor) -> tuple[int, bool, float]:
        assert torch.is_grad_enabled()
        loss = wrapper(micro).square().sum()
        loss.backward()
        return torch.get_num_threads(), torch.is_autocast_enabled("cpu"), loss.item()

    for wrapper in (ddp, plain):
        with torch.autocast("cpu", torch.bfloat16):
            found = wrapper.run_shards(rows(wrapper), functools.partial(loss_of, wrapper))
        assert len(found) == len(wrapper.shard_shares.owned)
        assert {each[:2] for each in found} == {(1, True)}


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return check.run(WORLD)


@pytest.mark.parametrize("name", check.names)
def test_check(outcomes: Outcomes, name: str) -> None:
    assert_passed(outcomes, name)
