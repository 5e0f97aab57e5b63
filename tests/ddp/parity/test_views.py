"""gradient_as_bucket_view: None (views, safely), True and False (torch's)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import DistributedDataParallel as DDP
from paceline.testing import run_ranks
from tests.ddp.compare import (
    assert_identical,
    batch,
    gradients,
    pair,
    step_both,
    train_both,
)
from tests.ddp.models import mlp


class InGraph:
    """Held by nothing but autograd, for a backward that is yet to come."""

    def __init__(self, grad: Tensor) -> None:
        self._factor = torch.ones_like(grad).requires_grad_()
        self._product = self._factor * grad

    def tolist(self) -> Any:
        (grad,) = torch.autograd.grad(self._product.sum(), self._factor, retain_graph=True)
        return grad.tolist()


def future_of(grad: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(grad)
    return future


HOLDS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda grad: grad,
    "row": lambda grad: grad[0],
    "detached": lambda grad: grad.detach(),
    "flat": lambda grad: grad.view(-1),
    "data": lambda grad: grad.data,
    "transposed": lambda grad: grad.t(),
    "numpy": lambda grad: grad.numpy(),
    "row in numpy": lambda grad: grad[0].numpy(),
    "storage": lambda grad: grad.untyped_storage(),
    "through dlpack": lambda grad: torch.from_dlpack(grad),
    "in a tuple": lambda grad: (grad,),
    "in a future": lambda grad: future_of(grad),
    "in a graph": lambda grad: InGraph(grad),
}


def value_of(held: Any) -> Any:
    if isinstance(held, tuple):
        return held[0].tolist()
    if isinstance(held, torch.futures.Future):
        return held.value().tolist()
    return held.tolist()


def step(ddp: nn.Module, number: int, width: int = 4) -> None:
    ddp(batch(number, width=width)).square().mean().backward()


@pytest.mark.parametrize("zero", ["module", "by hand"])
def test_a_held_gradient_never_changes(zero: str) -> None:
    def on_rank() -> list[str]:
        changed = []
        for how, hold in HOLDS.items():
            model = mlp(4)
            ddp = DDP(model, bucket_cap_mb=1e-4)
            for number in range(4):
                ddp.zero_grad()
                step(ddp, number)
                if number == 3:
                    break
                held = hold(model[0].weight.grad)
                before = value_of(held)
                if zero == "module":
                    ddp.zero_grad()
                else:
                    for parameter in model.parameters():
                        parameter.grad = None
                for later in range(2):
                    step(ddp, 10 + number + later)
                    ddp.zero_grad()
                if value_of(held) != before:
                    changed.append(how)
                del held
        return changed

    assert run_ranks(2, on_rank) == [[], []]


def test_holding_all_gradients_of_all_steps() -> None:
    def on_rank() -> None:
        model = mlp(4)
        ours, theirs = pair(model)
        history = []
        for number in range(4):
            found = step_both(ours, theirs, lambda m, n=number: m(batch(n)).square().mean())
            history.append(({n: p.grad for n, p in model.named_parameters()}, found))
        for held, found in history:
            assert_identical(held, found)

    run_ranks(2, on_rank)


class Pointers:
    """Where the gradients of a model lie."""

    def __init__(self, model: nn.Module) -> None:
        self.at = [p.grad.data_ptr() for p in model.parameters() if p.grad is not None]
        self.storages = {
            p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None
        }


@pytest.mark.parametrize(("views", "storages"), [(None, 1), (True, 1), (False, 6)])
def test_views_share_the_bucket(views: bool | None, storages: int) -> None:
    def on_rank() -> int:
        model = mlp(4)
        ours, theirs = pair(model, gradient_as_bucket_view=views)
        train_both(ours, theirs)
        return len(Pointers(model).storages)

    assert run_ranks(2, on_rank) == [storages] * 2


def test_memory_is_used_again_when_nobody_holds_it() -> None:
    def on_rank() -> None:
        for set_to_none in (True, False):
            model = mlp(4)
            ddp = DDP(model)
            places = []
            for number in range(5):
                ddp.zero_grad(set_to_none=set_to_none)
                step(ddp, number)
                places.append(Pointers(model).at)
            assert places[2:] == [places[1]] * 3, "after the rebuild, always the same memory"

    run_ranks(2, on_rank)


def test_true_overwrites_as_torch_does() -> None:
    def on_rank() -> bool:
        model = mlp(4)
        ddp = DDP(model, gradient_as_bucket_view=True)
        for number in range(2):
            ddp.zero_grad()
            step(ddp, number)
        held = model[0].weight.grad
        before = held.clone()
        ddp.zero_grad()
        step(ddp, 7)
        return torch.equal(held, before)

    assert run_ranks(2, on_rank) == [False, False]


def test_false_leaves_the_users_tensor_in_place() -> None:
    """With False, an existing gradient is written to, not replaced."""

    def on_rank() -> None:
        model = mlp(4)
        ddp = DDP(model, gradient_as_bucket_view=False)
        mine = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for name, parameter in model.named_parameters():
            parameter.grad = mine[name]
        for number in range(2):
            step(ddp, number)
            for name, parameter in model.named_parameters():
                assert parameter.grad is mine[name]

    run_ranks(2, on_rank)


@pytest.mark.parametrize("views", [None, True, False])
def test_accumulation_over_steps(views: bool | None) -> None:
    """No zero_grad at all: averages add up."""

    def on_rank() -> None:
        ours, theirs = pair(mlp(4), gradient_as_bucket_view=views)
        train_both(ours, theirs, 4, zero=False)

    run_ranks(2, on_rank)


@pytest.mark.parametrize("views", [None, True, False])
def test_gradients_that_the_user_replaced(views: bool | None) -> None:
    """Clipping, unscaling and assigning between steps: what counts is what p.grad is."""

    def on_rank() -> None:
        ours, theirs = pair(mlp(4), gradient_as_bucket_view=views)
        for number in range(4):
            step_both(ours, theirs, lambda m, n=number: m(batch(n)).square().mean(), zero=False)
            for ddp in (ours, theirs):
                nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
                weight = ddp.module[0].weight
                if not views:  # torch refuses a gradient that is no longer its view
                    weight.grad = weight.grad * 2
                ddp.module[2].bias.grad.mul_(3)

    run_ranks(2, on_rank)


def test_zeroing_a_held_gradient_in_place_is_the_users_own_doing() -> None:
    def on_rank() -> None:
        model = mlp(4)
        ddp, other = DDP(model), copy.deepcopy(model)
        for number in range(3):
            ddp.zero_grad(set_to_none=False)
            step(ddp, number)
        fresh = DDP(other)
        step(fresh, 2)
        assert_identical(gradients(ddp), gradients(fresh))

    run_ranks(2, on_rank)


def gradient_bytes_above_the_plain_model(views: bool | None, held: bool) -> float:
    """Peak of allocated bytes in a step, in units of one gradient set, above parameters."""
    from torch.profiler import ProfilerActivity, profile

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
    one_set = sum(p.nbytes for p in model.parameters())
    ddp = DDP(model, gradient_as_bucket_view=views, bucket_cap_mb=0.5)
    x = batch(0, width=256, rows=2)
    for _ in range(3):
        ddp.zero_grad()
        ddp(x).mean().backward()
    kept = [p.grad for p in model.parameters()] if held else []
    ddp.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        ddp(x).mean().backward()
    live = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    del kept
    return peak / one_set


def test_peak_memory() -> None:
    """A step with views allocates few gradients at a time; copies are a whole set more."""

    def on_rank() -> tuple[float, float, float]:
        return (
            gradient_bytes_above_the_plain_model(None, held=False),
            gradient_bytes_above_the_plain_model(False, held=False),
            gradient_bytes_above_the_plain_model(None, held=True),
        )

    for safe, copies, held in run_ranks(2, on_rank):
        assert safe < 0.5, "the bucket is there already; single gradients come and go"
        assert 0.9 < copies < 1.5, "a set of gradients beside the buckets"
        assert held < 1.5, "what a user holds needs one more set, and no more"
