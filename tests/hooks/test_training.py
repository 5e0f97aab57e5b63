"""Hooks compose with what wrappers do: buckets, views, no_sync, weights, join, unused."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from paceline import DistributedDataParallel as DDP
from paceline import hooks
from paceline.testing import run_ranks
from tests.hooks.grouped_cases import run_together

WRAPPERS = {"paceline": DDP, "torch": TorchDDP}
EARLY: dict[str, Any] = {"compresses_first_steps": True}
# With the relative error of a whole gradient that one step may have.
NAMES: dict[str, tuple[dict[str, Any], float]] = {
    "fp16": ({}, 1e-3),
    "bf16": ({}, 1e-2),
    "int8": ({}, 0.03),
    "e4m3": ({}, 0.06),
    "e5m2": ({}, 0.12),
    "powersgd": ({"start_powerSGD_iter": 0, **EARLY, "matrix_approximation_rank": 16}, 1e-3),
    "topk": ({"ratio": 1.0}, 1e-5),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)])


def batch(step: int, rank: int, rows: int = 8) -> Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(100 * step + rank))


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def exact_mean(step: int, weights: list[float] | None = None) -> Tensor:
    """The gradient of the (weighted) mean of all ranks' losses, in this process."""
    plain = net()
    world = dist.get_world_size()
    weights = weights or [1.0] * world
    losses = [
        plain(batch(step, rank)).square().mean() * weight / sum(weights)
        for rank, weight in enumerate(weights)
    ]
    torch.stack(losses).sum().backward()
    return gradient(plain)


def assert_near(found: Tensor, expected: Tensor, limit: float, what: object) -> None:
    error = ((found - expected).norm() / expected.norm()).item()
    assert error < limit, f"{what}: {error}"


def registered(wrap: Any, name: str, **options: Any) -> Any:
    model = wrap(net(), **({"bucket_cap_mb": 0.002} | options))
    hooks.register(model, name, **NAMES[name][0])
    return model


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("views", [False, True])
def test_many_buckets_and_views(wrapper: str, views: bool) -> None:
    """Several buckets in flight on gloo, where ranks must not mix them up."""

    def on_rank() -> None:
        for name, (_, limit) in NAMES.items():
            model = registered(WRAPPERS[wrapper], name, gradient_as_bucket_view=views)
            for step in range(4):
                model.zero_grad()
                model(batch(step, dist.get_rank())).square().mean().backward()
                assert_near(gradient(model), exact_mean(step), 2 * limit, (name, step))

    run_ranks(3, on_rank)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_no_sync(wrapper: str) -> None:
    def on_rank() -> None:
        for name, (_, limit) in NAMES.items():
            model = registered(WRAPPERS[wrapper], name)
            with model.no_sync():
                model(batch(0, dist.get_rank())).square().mean().backward()
            model(batch(1, dist.get_rank())).square().mean().backward()
            assert_near(gradient(model), exact_mean(0) + exact_mean(1), limit, name)

    run_ranks(2, on_rank)


def test_weighted_mean() -> None:
    def on_rank() -> None:
        weights = [1.0, 5.0, 2.0]
        for name, (_, limit) in NAMES.items():
            model = registered(DDP, name)
            for step in range(3):
                model.zero_grad()
                with model.weighted(weights[dist.get_rank()]):
                    model(batch(step, dist.get_rank())).square().mean().backward()
                assert_near(gradient(model), exact_mean(step, weights), 3 * limit, (name, step))

    run_ranks(3, on_rank)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_join(wrapper: str) -> None:
    """Rank 0 runs out of inputs first; the others go on, and divide by all ranks as torch does."""

    def on_rank() -> None:
        for name, (_, limit) in NAMES.items():
            model = registered(WRAPPERS[wrapper], name, bucket_cap_mb=25)
            steps = 2 if dist.get_rank() == 0 else 4
            with Join([model]):
                for step in range(steps):
                    model.zero_grad()
                    model(batch(step, dist.get_rank())).square().mean().backward()
            if dist.get_rank() == 1:
                plain = net()
                (plain(batch(3, 1)).square().mean() / 2).backward()
                assert_near(gradient(model), gradient(plain), 4 * limit, name)

    run_ranks(2, on_rank)


# Hooks that leave out much of a step: it must come later, however gradients were made.
LATE: dict[str, Callable[[], tuple[Any, Any]]] = {
    "sign": lambda: (hooks.QuantizedState(wire="sign", block=8), hooks.quantized_hook),
    "int8, stochastic": lambda: (hooks.QuantizedState(stochastic=True), hooks.quantized_hook),
    "topk": lambda: (hooks.TopKState(ratio=0.25), hooks.topk_hook),
    "powersgd": lambda: (hooks.PowerSGDState(None, 2, 0, **EARLY), hooks.powerSGD_hook),
    "batched powersgd": lambda: (
        hooks.PowerSGDState(None, 8, 0, **EARLY),
        hooks.batched_powerSGD_hook,
    ),
    "per tensor": lambda: (None, hooks.quantization_pertensor_hook),
    "per channel": lambda: (None, hooks.quantization_perchannel_hook),
    "powersgd in fp16": lambda: (
        hooks.PowerSGDState(None, 2, 0, **EARLY),
        hooks.fp16_compress_wrapper(hooks.powerSGD_hook),
    ),
    "topk in bf16": lambda: (
        hooks.TopKState(ratio=0.25),
        hooks.bf16_compress_wrapper(hooks.topk_hook),
    ),
}
MODES = ("plain", "no_sync", "weighted", "join", "views")
LATE_STEPS = 16
WEIGHTS = [1.0, 6.0]
LOUD = [5.0, 1.0]  # what losses are multiplied by: so that ranks differ


def late_total(name: str, mode: str) -> Tensor:
    """The sum of gradients over all steps, on the rank that goes on to the end."""
    rank = dist.get_rank()
    model = DDP(net(), bucket_cap_mb=0.004, gradient_as_bucket_view=mode == "views")
    model.register_comm_hook(*LATE[name]())
    total = torch.zeros_like(torch.cat([p.detach().flatten() for p in model.parameters()]))
    steps = LATE_STEPS // 2 if mode == "join" and rank == 0 else LATE_STEPS
    with Join([model]) if mode == "join" else contextlib.nullcontext():
        for _ in range(steps):
            model.zero_grad()
            if mode == "no_sync":
                with model.no_sync():
                    (LOUD[rank] * model(batch(1, rank)).square().mean()).backward()
            with model.weighted(WEIGHTS[rank]) if mode == "weighted" else contextlib.nullcontext():
                (LOUD[rank] * model(batch(0, rank)).square().mean()).backward()
            total += gradient(model)
    return total


def expected_total(mode: str) -> Tensor:
    loud = LATE_STEPS * sum(LOUD) / 2
    if mode == "no_sync":
        return loud * (exact_mean(0, LOUD) + exact_mean(1, LOUD))
    if mode == "weighted":
        both = [weight * factor for weight, factor in zip(WEIGHTS, LOUD, strict=True)]
        return LATE_STEPS * sum(both) / sum(WEIGHTS) * exact_mean(0, both)
    if mode == "join":  # rank 0 takes half of the steps; divided by both all the time
        both = [LOUD[0] / 2, LOUD[1]]
        return LATE_STEPS * sum(both) / 2 * exact_mean(0, both)
    return loud * exact_mean(0, LOUD)


def check_late(name: str) -> None:
    expected = {mode: expected_total(mode) for mode in MODES}
    found = {mode: late_total(name, mode) for mode in MODES}  # all of it before anything can fail
    for mode in MODES:
        if mode != "join" or dist.get_rank() == 1:
            assert_near(found[mode], expected[mode], 0.2, (name, mode))
    # The limit can fail: other modes are farther away than that.
    for other in ("no_sync", "weighted", "join"):
        distance = (expected[other] - expected["plain"]).norm() / expected["plain"].norm()
        assert distance > 0.35, (other, distance)


@functools.cache
def wrong_late() -> dict[str, str]:
    return run_together(2, check_late, list(LATE))


@pytest.mark.parametrize("name", LATE)
def test_what_comes_late_comes_in_every_mode(name: str) -> None:
    assert name not in wrong_late(), wrong_late()[name]


def test_unused_parameters() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor, left: bool) -> Tensor:
            return self.left(x) if left else self.right(x)

    def on_rank() -> None:
        for wrap in WRAPPERS.values():
            torch.manual_seed(0)
            model = wrap(Halves(), find_unused_parameters=True, bucket_cap_mb=0.0005)
            hooks.register(model, "int8")
            for _ in range(3):
                model.zero_grad()
                model(batch(0, 0), dist.get_rank() == 0).square().mean().backward()
                plain = Halves()
                plain.load_state_dict(model.module.state_dict())
                losses = [plain(batch(0, 0), left).square().mean() / 2 for left in (True, False)]
                sum(losses).backward()
                assert_near(gradient(model), gradient(plain), 0.05, wrap)

    run_ranks(2, on_rank)


def test_two_models_and_a_subgroup() -> None:
    def on_rank() -> None:
        pairs, _ = dist.new_subgroups(group_size=2)
        first = DDP(net(), bucket_cap_mb=0.002)
        second = DDP(net(), bucket_cap_mb=0.002, process_group=pairs)
        hooks.register(first, "int8")
        hooks.register(second, "int8", process_group=pairs)
        for step in range(3):
            for model in (first, second):
                model.zero_grad()
            x = batch(step, dist.get_rank())
            (first(x).square().mean() + second(x).square().mean()).backward()
            assert_near(gradient(first), exact_mean(step), 0.06, step)
            plain = net()
            base = dist.get_rank() // 2 * 2
            for rank in (base, base + 1):
                (plain(batch(step, rank)).square().mean() / 2).backward()
            assert_near(gradient(second), gradient(plain), 0.06, step)

    run_ranks(4, on_rank)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_registered_by_name_a_hook_reduces_over_the_group_of_its_wrapper(wrapper: str) -> None:
    def on_rank() -> None:
        pairs, _ = dist.new_subgroups(group_size=2)
        base = dist.get_rank() // 2 * 2
        for name, (_, limit) in NAMES.items():
            model = registered(WRAPPERS[wrapper], name, process_group=pairs)
            model(batch(0, dist.get_rank())).square().mean().backward()
            plain = net()
            for rank in (base, base + 1):
                (plain(batch(0, rank)).square().mean() / 2).backward()
            assert_near(gradient(model), gradient(plain), limit, name)

    run_ranks(4, on_rank)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_allreduce_hook_takes_sparse_gradients(wrapper: str) -> None:
    """It is what the error of the other hooks recommends."""

    def on_rank() -> None:
        torch.manual_seed(0)
        model = WRAPPERS[wrapper](nn.Embedding(6, 2, sparse=True))
        hooks.register(model, "allreduce")
        model(torch.tensor([dist.get_rank(), 5])).sum().backward()
        expected = torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0, 1.0]).unsqueeze(1).expand(6, 2)
        assert torch.equal(model.module.weight.grad.to_dense(), expected)

    run_ranks(2, on_rank)


def test_torchs_stateful_hooks_on_our_wrapper_and_ours_on_torchs_agree() -> None:
    """One state class, both wrappers: the same bits, because the buckets are the same."""

    def on_rank() -> None:
        for name in ("int8", "powersgd", "topk"):
            options = {"topk": {"ratio": 0.1}}.get(name, NAMES[name][0])
            models = [wrap(net(), bucket_cap_mb=0.002) for wrap in WRAPPERS.values()]
            for model in models:
                hooks.register(model, name, **options)
            for step in range(5):
                for model in models:
                    model.zero_grad()
                    model(batch(step, dist.get_rank())).square().mean().backward()
                assert torch.equal(*map(gradient, models)), (name, step)

    run_ranks(2, on_rank)
