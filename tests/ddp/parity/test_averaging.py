"""Gradients are those of one process with all ranks' data, in every dtype and memory layout."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline import DistributedDataParallel as DDP
from paceline.testing import run_ranks
from tests.ddp.compare import (
    assert_close,
    assert_same_on_all_ranks,
    batch,
    gradients,
    pair,
    step_both,
    train_both,
    whole_batch,
)
from tests.ddp.models import Tied, WithParameter, mlp, seeded

DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
WIDTH = 6


def loss_on(model: nn.Module, x: Tensor) -> Tensor:
    dtype = next(model.parameters()).dtype
    return model(x.to(dtype)).abs().square().mean()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_equals_training_on_the_concatenated_batch(world: int) -> None:
    def on_rank() -> None:
        for dtype in DTYPES:
            plain = mlp(WIDTH, dtype=dtype)
            ours = DDP(copy.deepcopy(plain), bucket_cap_mb=1e-4)
            for step in range(3):
                ours.zero_grad()
                plain.zero_grad()
                loss_on(ours, batch(step, width=WIDTH)).backward()
                loss_on(plain, whole_batch(step, width=WIDTH)).backward()
                assert_close(gradients(ours), gradients(plain), f"{dtype}, step {step}:")
                assert_same_on_all_ranks(gradients(ours))

    run_ranks(world, on_rank)


def test_every_dtype_equals_torch_bit_for_bit() -> None:
    def on_rank() -> None:
        for dtype in DTYPES:
            ours, theirs = pair(mlp(WIDTH, dtype=dtype))
            for step in range(3):
                found = step_both(
                    ours, theirs, lambda model, step=step: loss_on(model, batch(step, width=WIDTH))
                )
                assert all(value.dtype == dtype for value in found.values() if value is not None)

    run_ranks(2, on_rank)


def test_a_step_of_mixed_dtypes() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(4, 4, dtype=dtype) for dtype in DTYPES)

        def forward(self, x: Tensor) -> Tensor:
            outputs = [part(x.to(part.weight.dtype)) for part in self.parts]
            return torch.stack([output.abs().double() for output in outputs]).mean()

    def on_rank() -> int:
        ours, theirs = pair(seeded(Mixed))
        for step in range(3):
            step_both(ours, theirs, lambda model, step=step: model(batch(step)))
        return len(ours.stats().buckets)

    assert run_ranks(2, on_rank) == [len(DTYPES)] * 2, "one bucket per dtype"


class TestStrides:
    @pytest.mark.parametrize("views", [None, True, False])
    def test_gradients_have_those_of_the_parameter(self, views: bool | None) -> None:
        def on_rank() -> None:
            torch.manual_seed(0)
            transposed = WithParameter(torch.randn(4, 3).t(), nn.functional.linear)
            conv = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 2, 3))
            conv = conv.to(memory_format=torch.channels_last)
            for model, x in [(transposed, batch(width=4)), (conv, torch.randn(2, 4, 6, 6))]:
                ours, theirs = pair(model, gradient_as_bucket_view=views)
                for _ in range(3):
                    step_both(ours, theirs, lambda each, x=x: each(x).square().mean())
                    for parameter in model.parameters():
                        assert parameter.grad is not None
                        assert parameter.grad.stride() == parameter.stride()

        run_ranks(2, on_rank)

    def test_of_a_parameter_that_is_not_dense(self) -> None:
        def on_rank() -> None:
            torch.manual_seed(0)
            model = WithParameter(torch.randn(6, 8)[::2, ::2], nn.functional.linear)
            ours, theirs = pair(model)
            train_both(ours, theirs)
            assert model.weight.grad is not None
            assert model.weight.grad.is_contiguous()

        run_ranks(2, on_rank)


def test_shared_weight_gets_the_sum_of_its_uses() -> None:
    def on_rank() -> None:
        plain = seeded(Tied)
        ours, theirs = pair(copy.deepcopy(plain))
        for step in range(3):
            found = step_both(ours, theirs, lambda m, step=step: m(batch(step)).square().mean())
            plain.zero_grad()
            plain(whole_batch(step)).square().mean().backward()
            assert_close(found, gradients(plain))

    run_ranks(2, on_rank)


def test_construction_copies_parameters_and_buffers_of_rank_0() -> None:
    class Model(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((3,), value))
            self.register_buffer("seen", torch.full((2,), value))

    def on_rank() -> tuple[list[float], list[float]]:
        model = Model(float(dist.get_rank()) + 5)
        DDP(model)
        alone = Model(float(dist.get_rank()) + 5)
        DDP(alone, init_sync=False)
        state = [model.weight[0].item(), model.seen[0].item()]
        return state, [alone.weight[0].item(), alone.seen[0].item()]

    synced, own = zip(*run_ranks(2, on_rank), strict=True)
    assert list(synced) == [[5.0, 5.0], [5.0, 5.0]]
    assert list(own) == [[5.0, 5.0], [6.0, 6.0]], "init_sync=False leaves every rank its own"


def test_large_and_small_gradients_in_one_bucket() -> None:
    """Gradients above 128 KiB take another way in than small ones."""

    def on_rank() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 300), nn.Linear(300, 200), nn.Linear(200, 2))
        for options in ({}, {"batched_grad_copy": True}, {"gradient_as_bucket_view": False}):
            ours, theirs = pair(copy.deepcopy(model), **options)
            train_both(ours, theirs)

    run_ranks(2, on_rank)
