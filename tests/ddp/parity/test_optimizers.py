"""Optimizers that run inside backward, and parameters whose reduction is delayed."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward

from paceline import DistributedDataParallel as DDP
from paceline.testing import run_ranks
from tests.ddp.compare import (
    assert_close,
    assert_identical,
    assert_same_on_all_ranks,
    assert_sum_over_batches,
    batch,
    gradients,
    reference_gradients,
)
from tests.ddp.models import mlp


def state(model: nn.Module) -> dict[str, Tensor]:
    model = model.module if isinstance(model, DDP) else model
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def train_plainly(ddp: DDP, steps: int, **options: Any) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(ddp.parameters(), **options)
    for step in range(steps):
        optimizer.zero_grad()
        ddp(batch(step)).square().mean().backward()
        optimizer.step()
    return state(ddp)


SGD = {"lr": 0.1, "momentum": 0.9}


class TestInBackward:
    @pytest.mark.parametrize("views", [None, True, False])
    def test_equals_a_step_after_backward(self, views: bool | None) -> None:
        def on_rank() -> None:
            options = {"gradient_as_bucket_view": views, "bucket_cap_mb": 1e-4}
            expected = train_plainly(DDP(mlp(4), **options), 4, **SGD)
            model = mlp(4)
            _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), SGD)
            ddp = DDP(model, **options)
            for step in range(4):
                ddp(batch(step)).square().mean().backward()
                assert all(p.grad is None for p in model.parameters())
            assert_identical(state(ddp), expected)

        run_ranks(2, on_rank)

    def test_some_parameters_only(self) -> None:
        def on_rank() -> None:
            expected = train_plainly(DDP(mlp(4)), 3, lr=0.1)
            model = mlp(4)
            _apply_optimizer_in_backward(torch.optim.SGD, model[0].parameters(), {"lr": 0.1})
            ddp = DDP(model)
            rest = torch.optim.SGD([*model[2].parameters(), *model[4].parameters()], lr=0.1)
            for step in range(3):
                rest.zero_grad()
                ddp(batch(step)).square().mean().backward()
                assert model[0].weight.grad is None
                assert model[2].weight.grad is not None
                rest.step()
            assert_identical(state(ddp), expected)

        run_ranks(2, on_rank)

    def test_runs_when_the_bucket_is_reduced_not_at_the_end(self) -> None:
        """The last layer has learnt before backward is at the first one."""

        def on_rank() -> list[bool]:
            model = mlp(4, depth=6)
            last = model[-1].weight
            _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
            ddp = DDP(model, bucket_cap_mb=1e-5)
            ddp(batch(0)).square().mean().backward()  # shows the order
            before = last.detach().clone()
            moved: list[bool] = []

            def look(*_: Any) -> None:
                dist.barrier()  # gives the reductions that have started time to end
                moved.append(not torch.equal(last, before))

            for layer in model[1::2]:
                layer.register_full_backward_pre_hook(look)
            is_early = []
            for step in range(1, 11):  # on a busy machine, they do not always get that time
                before.copy_(last.detach())
                moved.clear()
                ddp(batch(step)).square().mean().backward()
                assert len(moved) == 5
                is_early.append(moved[-1])
            return is_early

        for is_early in run_ranks(2, on_rank):
            assert any(is_early)

    def test_find_unused(self) -> None:
        def on_rank() -> None:
            expected = train_plainly(DDP(mlp(4), find_unused_parameters=True), 3, lr=0.1)
            model = mlp(4)
            _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
            ddp = DDP(model, find_unused_parameters=True)
            for step in range(3):
                ddp(batch(step)).square().mean().backward()
            assert_identical(state(ddp), expected)

        run_ranks(2, on_rank)


class TestFused:
    @pytest.mark.parametrize("views", [None, True, False])
    def test_register_fused_optim(self, views: bool | None) -> None:
        def on_rank() -> None:
            options = {"gradient_as_bucket_view": views, "bucket_cap_mb": 1e-4}
            expected = train_plainly(DDP(mlp(4), **options), 4, **SGD)
            ddp = DDP(mlp(4), **options)
            ddp._register_fused_optim(torch.optim.SGD, **SGD)
            for step in range(4):
                ddp.zero_grad()
                ddp(batch(step)).square().mean().backward()
            assert_identical(state(ddp), expected)
            assert_same_on_all_ranks(state(ddp))

        run_ranks(2, on_rank)

    def test_some_parameters(self) -> None:
        def on_rank() -> None:
            expected = train_plainly(DDP(mlp(4)), 3, lr=0.1)
            model = mlp(4)
            ddp = DDP(model)
            mine = {*model[0].parameters()}
            ddp._register_fused_optim(torch.optim.SGD, lr=0.1, optim_params=list(mine))
            rest = torch.optim.SGD([p for p in model.parameters() if p not in mine], lr=0.1)
            for step in range(3):
                ddp.zero_grad()
                ddp(batch(step)).square().mean().backward()
                rest.step()
            assert_identical(state(ddp), expected)

        run_ranks(2, on_rank)

    def test_adam(self) -> None:
        def on_rank() -> None:
            plain, ddp = DDP(mlp(4)), DDP(mlp(4))
            optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
            ddp._register_fused_optim(torch.optim.Adam, lr=0.01)
            for step in range(3):
                for model in (plain, ddp):
                    model.zero_grad()
                    model(batch(step)).square().mean().backward()
                optimizer.step()
            assert_close(state(ddp), state(plain))

        run_ranks(2, on_rank)


class TestDelayed:
    @staticmethod
    def options(model: nn.Sequential, names: list[str]) -> dict[str, Any]:
        named = dict(model.named_parameters())
        return {
            "delay_all_reduce_named_params": [(name, named[name]) for name in names],
            "param_to_hook_all_reduce": model[2].weight,
        }

    def test_equals_one_process(self) -> None:
        """Not compared with torch, which does not wait for the delayed reduction on the CPU."""

        def on_rank() -> None:
            model = mlp(4)
            ddp = DDP(model, **self.options(model, ["4.weight", "4.bias"]))
            for step in range(3):
                ddp.zero_grad()
                ddp(batch(step)).square().mean().backward()
                expected = reference_gradients(
                    ddp, lambda m, rank, s=step: m(batch(s, rank)).square().mean()
                )
                assert_close(gradients(ddp), expected)
                assert_same_on_all_ranks(gradients(ddp))

        run_ranks(2, on_rank)

    def test_all_parameters(self) -> None:
        """Then the wrapper has no buckets. A parameter outside it says when."""

        def on_rank() -> None:
            model, trigger = mlp(4), nn.Parameter(torch.ones(4))
            delayed = list(model.named_parameters())
            ddp = DDP(
                model, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=trigger
            )
            for step in range(3):
                ddp.zero_grad()
                ddp(batch(step) * trigger).square().mean().backward()
                expected = reference_gradients(
                    ddp, lambda m, rank, s=step: m(batch(s, rank)).square().mean()
                )
                assert_close(gradients(ddp), expected)

        run_ranks(2, on_rank)

    def test_no_sync(self) -> None:
        def on_rank() -> None:
            model = mlp(4)
            ddp = DDP(model, **self.options(model, ["4.weight", "4.bias"]))
            for step in range(2):
                ddp.zero_grad()
                for micro in range(3):
                    with ddp.no_sync() if micro < 2 else contextlib.nullcontext():
                        ddp(batch(10 * step + micro)).square().mean().backward()
                assert_sum_over_batches(ddp, [10 * step + micro for micro in range(3)])

        run_ranks(2, on_rank)

    def test_parameters_start_equal(self) -> None:
        def on_rank() -> Tensor:
            model = mlp(4, seed=dist.get_rank())
            DDP(model, **self.options(model, ["4.weight"]))
            return model[4].weight.detach().clone()

        first, second = run_ranks(2, on_rank)
        assert torch.equal(first, second)
