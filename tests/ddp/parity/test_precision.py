"""Mixed precision and autocast: low precision inside a step, full precision outside."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

from paceline import DistributedDataParallel as DDP
from paceline.testing import run_ranks
from tests.ddp.compare import (
    Gradients,
    assert_same_on_all_ranks,
    batch,
    gradients,
    pair,
    step_both,
)
from tests.ddp.models import Branches, mlp, seeded

HALVES = [torch.float16, torch.bfloat16]
CONFIGS = [
    _MixedPrecision(param_dtype=dtype, reduce_dtype=reduce, buffer_dtype=dtype)
    for dtype in HALVES
    for reduce in (None, dtype, torch.float32)
] + [_MixedPrecision(param_dtype=None, reduce_dtype=torch.float16, buffer_dtype=None)]


def by_hand(model: nn.Module, config: _MixedPrecision, inputs: list[list[Tensor]]) -> Gradients:
    """Every rank's gradient in param_dtype, divided and summed in reduce_dtype, then cast up.

    Accumulated gradients (more than one input per rank) add up in full precision before that.
    """
    low = config.param_dtype or torch.float32
    reduce = config.reduce_dtype or low
    total: dict[str, Tensor] = {}
    for mine in inputs:
        twin = copy.deepcopy(model)
        kept: dict[str, Tensor] = {}
        for x in mine:
            each = copy.deepcopy(twin).to(low)
            each(x.to(low)).float().square().mean().backward()
            for name, value in gradients(each).items():
                assert value is not None
                kept[name] = kept[name] + value.float() if name in kept else value
        for name, value in kept.items():
            part = value.to(reduce) / len(inputs)
            total[name] = total[name] + part if name in total else part
    return {name: value.float() for name, value in total.items()}


def assert_near(found: Gradients, expected: Gradients, config: _MixedPrecision) -> None:
    tolerance = 2e-2 if torch.bfloat16 in (config.param_dtype, config.reduce_dtype) else 3e-3
    for name, value in found.items():
        assert value is not None
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("views", [None, True, False])
def test_all_combinations(views: bool | None) -> None:
    def on_rank() -> None:
        for config in CONFIGS:
            model = mlp(4)
            ddp = DDP(model, mixed_precision=config, gradient_as_bucket_view=views)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            for step in range(3):
                plain = copy.deepcopy(model)
                for parameter in plain.parameters():
                    parameter.grad = None
                optimizer.zero_grad()
                output = ddp(batch(step))
                assert output.dtype == (config.param_dtype or torch.float32)
                output.float().square().mean().backward()
                expected = by_hand(plain, config, [[batch(step, rank)] for rank in range(2)])
                assert_near(gradients(ddp), expected, config)
                assert_same_on_all_ranks(gradients(ddp))
                assert all(p.dtype == torch.float32 for p in model.parameters())
                optimizer.step()

    run_ranks(2, on_rank)


def test_reducing_in_float32_is_more_exact() -> None:
    """Two gradients that float16 cannot add: 1 + 2**-12 is 1 there."""

    class Value(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x

    def on_rank() -> list[float]:
        x = torch.tensor([2.0 if dist.get_rank() == 0 else 2.0**-11])
        sums = []
        for reduce in (torch.float16, torch.float32):
            model = Value()
            config = _MixedPrecision(param_dtype=torch.float16, reduce_dtype=reduce)
            ddp = DDP(model, mixed_precision=config)
            ddp(x).sum().backward()
            sums.append(model.weight.grad.item())
        return sums

    assert run_ranks(2, on_rank) == [[1.0, 1.0 + 2.0**-12]] * 2


def test_no_sync_accumulates_in_full_precision() -> None:
    def on_rank() -> None:
        for views in (None, False):
            config = _MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32)
            model = mlp(4)
            ddp = DDP(model, mixed_precision=config, gradient_as_bucket_view=views)
            for step in range(2):
                ddp.zero_grad()
                with ddp.no_sync():
                    for micro in range(2):
                        ddp(batch(10 * step + micro)).float().square().mean().backward()
                        assert model[0].weight.dtype == torch.float32
                        assert model[0].weight.grad.dtype == torch.float32
                ddp(batch(10 * step + 2)).float().square().mean().backward()
                inputs = [[batch(10 * step + m, rank) for m in range(3)] for rank in range(2)]
                plain = copy.deepcopy(model)
                plain.zero_grad()
                assert_near(gradients(ddp), by_hand(plain, config, inputs), config)

    run_ranks(2, on_rank)


def test_outside_a_step_everything_is_full_precision() -> None:
    def on_rank() -> None:
        config = _MixedPrecision(param_dtype=torch.bfloat16)
        model = mlp(4)
        exact = {name: value.clone() for name, value in model.state_dict().items()}
        ddp = DDP(model, mixed_precision=config)
        with torch.no_grad():
            assert ddp(batch(0)).dtype == torch.bfloat16
        for name, value in ddp.module.state_dict().items():
            assert torch.equal(value, exact[name]), f"{name} after an evaluation"
        output = ddp(batch(0))  # no backward yet
        for name, value in ddp.module.state_dict().items():
            assert torch.equal(value, exact[name]), f"{name} in the middle of a step"
        del output
        ddp(batch(1)).float().mean().backward()
        assert all(torch.equal(v, exact[n]) for n, v in ddp.module.state_dict().items())

    run_ranks(2, on_rank)


def test_evaluation_between_forward_passes() -> None:
    def on_rank() -> None:
        config = _MixedPrecision(param_dtype=torch.float16)
        one, two = DDP(mlp(4), mixed_precision=config), DDP(mlp(4), mixed_precision=config)
        for step in range(3):
            for ddp in (one, two):
                ddp.zero_grad()
                ddp(batch(step)).float().square().mean().backward()
            two.eval()
            with torch.no_grad():
                two(batch(99))
            two.train()
            for name, value in gradients(one).items():
                assert torch.equal(value, gradients(two)[name]), name

    run_ranks(2, on_rank)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.second, self.first(x).tanh(), use_reentrant=reentrant)

    class Plain(Checkpointed):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).tanh())

    def on_rank() -> None:
        config = _MixedPrecision(param_dtype=torch.float16)
        static = {"static_graph": True} if reentrant else {}
        ddp = DDP(seeded(Checkpointed), mixed_precision=config, **static)
        plain = DDP(seeded(Plain), mixed_precision=config)
        for step in range(3):
            for model in (ddp, plain):
                model.zero_grad()
                model(batch(step)).float().square().mean().backward()
            for name, value in gradients(ddp).items():
                assert torch.equal(value, gradients(plain)[name]), name

    run_ranks(2, on_rank)


def test_unused_parameters() -> None:
    def on_rank() -> None:
        torch.manual_seed(0)
        config = _MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32)
        ddp = DDP(Branches(), mixed_precision=config, find_unused_parameters=True)
        names = ["ab", "b"][dist.get_rank()]
        for step in range(3):
            ddp.zero_grad()
            ddp(batch(step), names).float().mean().backward()
            found = gradients(ddp)
            assert found["branches.a.weight"] is not None
            assert found["branches.c.weight"] is None
            assert_same_on_all_ranks(found)
            assert all(p.dtype == torch.float32 for p in ddp.parameters())

    run_ranks(2, on_rank)


def test_buffers_have_their_dtype() -> None:
    class WithBuffers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("scale", torch.full((1,), 2.0))
            self.register_buffer("count", torch.zeros(1, dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            assert self.scale.dtype == x.dtype
            return self.linear(x) * self.scale

    def on_rank() -> None:
        config = _MixedPrecision(param_dtype=torch.float16, buffer_dtype=torch.float16)
        ddp = DDP(seeded(WithBuffers), mixed_precision=config)
        ddp(batch(0)).float().mean().backward()
        assert ddp.module.scale.dtype == torch.float16
        assert ddp.module.count.dtype == torch.int64

    run_ranks(2, on_rank)


@pytest.mark.parametrize("dtype", HALVES)
def test_autocast(dtype: torch.dtype) -> None:
    def on_rank() -> None:
        ours, theirs = pair(mlp(4))

        def loss(model: nn.Module, step: int) -> Tensor:
            with torch.autocast("cpu", dtype=dtype):
                output: Any = model(batch(step))
                assert output.dtype == dtype
                return output.float().square().mean()

        for step in range(3):
            found = step_both(ours, theirs, lambda m, s=step: loss(m, s))
            assert all(value.dtype == torch.float32 for value in found.values())

    run_ranks(2, on_rank)


def test_gradient_scaler() -> None:
    def on_rank() -> None:
        ours, theirs = pair(mlp(4))
        for ddp in (ours, theirs):
            scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            for step in range(3):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.float16):
                    value = ddp(batch(step)).float().square().mean()
                scaler.scale(value).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
        for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(one, two)

    run_ranks(2, on_rank)
