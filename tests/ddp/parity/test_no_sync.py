"""no_sync(): gradients accumulate locally, the first backward outside reduces the sum."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline import DistributedDataParallel as DDP
from paceline.testing import run_ranks
from tests.ddp.compare import (
    assert_close,
    assert_identical,
    assert_same_on_all_ranks,
    batch,
    gradients,
    pair,
    reference_gradients,
    whole_batch,
)
from tests.ddp.models import Branches, Normed, mlp, seeded


def loss(model: nn.Module, number: int, rank: int | None = None) -> Tensor:
    return model(batch(number, rank)).square().mean()


@pytest.mark.parametrize("views", [None, True, False])
@pytest.mark.parametrize("local", [1, 3])
def test_equals_one_large_batch(views: bool | None, local: int) -> None:
    def on_rank() -> None:
        plain = mlp(4)
        ours, theirs = pair(mlp(4), gradient_as_bucket_view=views)
        for step in range(3):
            for model in (ours, theirs, plain):
                model.zero_grad()
            for micro in range(local + 1):
                is_local = micro < local
                for model in (ours, theirs):
                    with model.no_sync() if is_local else contextlib.nullcontext():
                        loss(model, 10 * step + micro).backward()
                plain(whole_batch(10 * step + micro)).square().mean().backward()
            assert_identical(gradients(ours), gradients(theirs))
            assert_close(gradients(ours), gradients(plain))

    run_ranks(2, on_rank)


def test_nothing_is_sent_inside() -> None:
    def on_rank() -> None:
        plain, ddp = mlp(4), DDP(mlp(4))
        loss(ddp, 0).backward()
        ddp.zero_grad()
        before = ddp.stats()
        if dist.get_rank() == 0:  # alone: a collective would hang
            with ddp.no_sync():
                loss(ddp, 1).backward()
            loss(plain, 1).backward()
            assert_identical(gradients(ddp), gradients(plain))
        assert ddp.stats().steps == before.steps
        assert ddp.stats().reduced_bytes == before.reduced_bytes

    run_ranks(2, on_rank)


def test_nests() -> None:
    def on_rank() -> list[bool]:
        ddp = DDP(mlp(4))
        flags = []
        with ddp.no_sync():
            with ddp.no_sync():
                flags.append(ddp.require_backward_grad_sync)
            flags.append(ddp.require_backward_grad_sync)
            loss(ddp, 0).backward()
        flags.append(ddp.require_backward_grad_sync)
        loss(ddp, 1).backward()
        assert_same_on_all_ranks(gradients(ddp))
        return flags

    assert run_ranks(2, on_rank) == [[False, False, True]] * 2


def test_an_exception_passes_through_and_syncing_is_on_again() -> None:
    def on_rank() -> None:
        ddp = DDP(mlp(4))

        def stopped() -> None:
            with ddp.no_sync():
                loss(ddp, 0).backward()
                raise KeyError

        with pytest.raises(KeyError):
            stopped()
        assert ddp.require_backward_grad_sync
        ddp.zero_grad()
        loss(ddp, 1).backward()
        expected = reference_gradients(ddp, lambda model, rank: loss(model, 1, rank))
        assert_close(gradients(ddp), expected)

    run_ranks(2, on_rank)


def test_forward_inside_decides_not_backward() -> None:
    """torch's rule: the forward must be inside; a backward that follows outside stays local."""

    def on_rank() -> None:
        plain, (ours, theirs) = mlp(4), pair(mlp(4))
        for model in (ours, theirs):
            with model.no_sync():
                value = loss(model, 0)
            value.backward()
        loss(plain, 0).backward()
        assert_identical(gradients(ours), gradients(theirs))
        assert_identical(gradients(ours), gradients(plain))

    run_ranks(2, on_rank)


def test_no_sync_as_the_very_first_steps() -> None:
    def on_rank() -> None:
        ours, theirs = pair(mlp(4), bucket_cap_mb=1e-5)
        for step in range(2):
            for model in (ours, theirs):
                model.zero_grad()
                for micro in range(3):
                    with model.no_sync() if micro < 2 else contextlib.nullcontext():
                        loss(model, 5 * step + micro).backward()
            assert_identical(gradients(ours), gradients(theirs))

    run_ranks(2, on_rank)


def test_a_parameter_used_only_inside() -> None:
    """Used in a local backward and not in the one that synchronises: its sum is reduced."""

    def on_rank() -> None:
        torch.manual_seed(0)
        model = Branches("ab")
        ddp = DDP(model, find_unused_parameters=True)
        with ddp.no_sync():
            ddp(batch(0), "ab").mean().backward()
        ddp(batch(1), "a").mean().backward()

        def both(plain: nn.Module, rank: int) -> Tensor:
            return plain(batch(0, rank), "ab").mean() + plain(batch(1, rank), "a").mean()

        assert_close(gradients(ddp), reference_gradients(ddp, both))
        assert_same_on_all_ranks(gradients(ddp))

    run_ranks(2, on_rank)


def test_buffers_stay_local_inside() -> None:
    def on_rank() -> tuple[list[float], list[float]]:
        ddp = DDP(seeded(Normed))
        with ddp.no_sync():
            for number in range(2):
                ddp(batch(number)).square().mean().backward()
        inside = ddp.module.norm.running_mean.tolist()
        for number in (2, 3):  # the first synchronised forward catches up, as in torch
            ddp(batch(number)).square().mean().backward()
        before_next_forward = ddp.module.norm.running_mean.clone()
        assert not torch.equal(before_next_forward, torch.tensor(inside))
        return inside, ddp.module.norm.num_batches_tracked.item()

    (first, count), (second, other) = run_ranks(2, on_rank)
    assert first != second
    assert count == other == 4
