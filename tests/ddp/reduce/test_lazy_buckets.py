"""lazy_bucket_allocation: buckets have memory from their first gradient to the end of the step.

With everything else together: ``tests/ddp/parity/test_pairs.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from paceline import DistributedDataParallel as DDP
from paceline.errors import UnusedParametersError
from paceline.testing import run_ranks
from tests.ddp.compare import assert_identical, batch, gradients
from tests.ddp.models import Branches, mlp


def step(ddp: nn.Module, number: int) -> Tensor:
    loss: Tensor = ddp(batch(number).requires_grad_()).square().mean()
    loss.backward()
    return loss


def with_memory(ddp: DDP) -> list[bool]:
    assert ddp.reducer is not None
    return [bucket.flat is not None for bucket in ddp.reducer.buckets]


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("views", [None, True, False])
def test_gradients_are_the_same_bit_for_bit(views: bool | None, transport: str) -> None:
    def on_rank() -> None:
        options: dict[str, Any] = {
            "gradient_as_bucket_view": views,
            "transport": transport,
            "bucket_cap_mb": 1e-4,
        }
        lazy = DDP(mlp(4, depth=4), lazy_bucket_allocation=True, **options)
        eager = DDP(mlp(4, depth=4), **options)
        for number in range(6):
            for ddp in (lazy, eager):
                if number % 3 == 0:  # every third: not None, but zero
                    ddp.zero_grad(set_to_none=False)
                elif number % 3 == 1:
                    ddp.zero_grad()
                step(ddp, number)
            assert_identical(gradients(lazy), gradients(eager), f"step {number}")

    run_ranks(2, on_rank)


def test_memory_comes_with_gradients_and_goes_with_the_step() -> None:
    def on_rank() -> tuple[list[int], list[bool], bool, bool]:
        ddp = DDP(mlp(4, depth=4), lazy_bucket_allocation=True, bucket_cap_mb=1e-5)
        step(ddp, 0)  # the order is learnt, and buckets are cut
        ddp.zero_grad()
        counts: list[int] = []
        first = ddp.module[0]
        assert isinstance(first, nn.Linear)
        for layer in ddp.module:
            if isinstance(layer, nn.Linear):
                layer.register_full_backward_hook(lambda *_: counts.append(sum(with_memory(ddp))))
        step(ddp, 1)
        after = with_memory(ddp)
        assert first.weight.grad is not None
        storage = StorageWeakRef(first.weight.grad.untyped_storage())
        lives = not storage.expired()
        ddp.zero_grad()
        return counts, after, lives, storage.expired()

    for counts, after, lives, is_gone in run_ranks(2, on_rank):
        assert len(after) == 8
        assert not any(after)
        assert counts == sorted(counts)
        assert counts[0] < counts[-1] < 8
        assert lives  # as long as gradients are views of it
        assert is_gone


def test_without_views_no_memory_is_kept() -> None:
    def on_rank() -> bool:
        ddp = DDP(mlp(4), lazy_bucket_allocation=True, gradient_as_bucket_view=False)
        step(ddp, 0)
        return any(with_memory(ddp))

    assert run_ranks(2, on_rank) == [False, False]


def test_goes_on_after_a_step_that_failed() -> None:
    def on_rank() -> None:
        lazy = DDP(Branches(), lazy_bucket_allocation=True, bucket_cap_mb=1e-4)
        eager = DDP(Branches(), bucket_cap_mb=1e-4)
        eager.load_state_dict(lazy.state_dict())
        for number, names in enumerate(["abc", "ab", "abc", "abc"]):
            for ddp in (lazy, eager):
                ddp.zero_grad()
                loss = ddp(batch(number), names).sum()
                if names == "abc":
                    loss.backward()
                else:
                    with pytest.raises(UnusedParametersError):
                        loss.backward()
            if names == "abc":
                assert_identical(gradients(lazy), gradients(eager), f"step {number}")
        assert not any(with_memory(lazy))

    run_ranks(2, on_rank)


def test_is_told_as_torch_tells_it() -> None:
    def on_rank() -> tuple[bool, bool]:
        torch.manual_seed(0)
        lazy = DDP(nn.Linear(2, 2), lazy_bucket_allocation=True)
        return lazy.lazy_bucket_allocation, DDP(nn.Linear(2, 2)).lazy_bucket_allocation

    assert run_ranks(1, on_rank) == [(True, False)]
