"""Wrappers that share layers, in one backward: the shared gradient is that of one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import _apply_optimizer_in_backward

from paceline import DistributedDataParallel as DDP
from paceline.testing import run_ranks
from tests.ddp.checks import Checks, Outcomes, assert_passed
from tests.ddp.compare import (
    Gradients,
    TorchDDP,
    assert_close,
    assert_same_on_all_ranks,
    batch,
    gradients,
)

WIDTH = 4

check = Checks()


class Net(nn.Module):
    """A shared part, and a head of its own."""

    def __init__(self, shared: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.shared = shared
        self.own = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.shared(x).tanh())


class Words(nn.Module):
    """A sparse embedding of numbers made from the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table((x.abs() * 10).long() % 7).sum(dim=1)


def nets(count: int = 2, shared: Callable[[], nn.Module] | None = None) -> nn.ModuleList:
    torch.manual_seed(0)
    part = shared() if shared else nn.Linear(WIDTH, WIDTH)
    return nn.ModuleList(Net(part) for _ in range(count))


def loss_of(net: nn.Module, number: int, step: int, rank: int | None = None) -> Tensor:
    return net(batch(10 * step + number, rank)).square().mean()


def total(models: Sequence[nn.Module], step: int, rank: int | None = None) -> Tensor:
    losses = [loss_of(model, number, step, rank) for number, model in enumerate(models)]
    return torch.stack(losses).sum()


def backward_alone(plain: nn.ModuleList, step: int, weights: Sequence[float] | None = None) -> None:
    world = dist.get_world_size()
    weights = weights or [1.0] * world
    for rank in range(world):
        (total(list(plain), step, rank) * weights[rank] / sum(weights)).backward()


def check_steps(
    models: nn.ModuleList,
    wrappers: Sequence[nn.Module],
    *,
    steps: int = 3,
    zero: bool = True,
    weights: Sequence[float] | None = None,
) -> None:
    plain = copy.deepcopy(models)
    for step in range(steps):
        if zero:
            models.zero_grad()
            plain.zero_grad()
        total(wrappers, step).backward()
        backward_alone(plain, step, weights)
        found = gradients(models)
        assert_close(found, gradients(plain), f"step {step}:")
        assert_same_on_all_ranks(found)


# --- what is right -------------------------------------------------------------------------------

VIEWS = [{"gradient_as_bucket_view": views} for views in (None, True, False)]


@dataclass(frozen=True)
class Case:
    """Two wrappers with options of their own."""

    first: dict[str, Any] = field(default_factory=dict)
    second: dict[str, Any] = field(default_factory=dict)
    zero: bool = True


UNUSED = {"find_unused_parameters": True}
STATIC = {"static_graph": True}
CASES = [
    *(Case(a, b) for a in VIEWS for b in VIEWS),
    *(Case(v, v, zero=False) for v in VIEWS),
    *(Case(a, b) for a in ({}, UNUSED, STATIC) for b in (UNUSED, STATIC)),
    Case(STATIC, {"gradient_as_bucket_view": True}, zero=False),
    Case({"batched_grad_copy": True}, {}),
    Case({"bucket_cap_mb": 1e-5}, {}),
    Case({"bucket_cap_mb": 1e-5}, {"bucket_cap_mb": 1e-5}, zero=False),
    Case({"missing_gradients": "wait"}, {"missing_gradients": "wait"}),
    Case({"nonfinite": "raise"}, {}),
]


@check.each("shm", "c10d")
def two_wrappers_in_one_backward(transport: str) -> None:
    for case in CASES:
        models = nets()
        options = [case.first, case.second]
        wrappers = [DDP(m, transport=transport, **o) for m, o in zip(models, options)]  # noqa: B905
        try:
            check_steps(models, wrappers, zero=case.zero)
        except Exception as error:
            raise AssertionError(f"{case}") from error


@check
def torch_gives_the_same_numbers() -> None:
    ours, theirs = nets(), nets()
    wrapped = [[DDP(m) for m in ours], [TorchDDP(m) for m in theirs]]
    for step in range(3):
        for models, wrappers in zip((ours, theirs), wrapped, strict=True):
            models.zero_grad()
            total(wrappers, step).backward()
        assert_close(gradients(ours), gradients(theirs), f"step {step}:")


@check
def three_wrappers() -> None:
    models = nets(3)
    check_steps(models, [DDP(model) for model in models])


@check
def two_wrappers_of_one_module() -> None:
    torch.manual_seed(0)
    net = Net(nn.Linear(WIDTH, WIDTH))
    models = nn.ModuleList([net, net])
    check_steps(models, [DDP(net), DDP(net)])


@check
def a_chain_in_which_every_wrapper_shares_with_the_next() -> None:
    torch.manual_seed(0)
    parts = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    models = nn.ModuleList(nn.Sequential(parts[i], nn.Tanh(), parts[i - 1]) for i in range(3))
    check_steps(models, [DDP(model) for model in models], zero=False)


@check
def large_gradients_in_several_buckets() -> None:
    for options in ({}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.2}):
        torch.manual_seed(0)
        part = nn.Sequential(nn.Linear(WIDTH, 600), nn.Tanh(), nn.Linear(600, 400))
        models = nn.ModuleList(Net(part, 400) for _ in range(2))
        check_steps(models, [DDP(model, **options) for model in models], zero=False)


@check
def a_shared_sparse_embedding() -> None:
    for zero in (True, False):
        models = nets(shared=Words)
        check_steps(models, [DDP(model) for model in models], zero=zero)


@check
def a_hook_on_one_of_them() -> None:
    for hooked in (0, 1):
        models = nets()
        wrappers = [DDP(model) for model in models]
        wrappers[hooked].register_comm_hook(None, default_hooks.allreduce_hook)
        check_steps(models, wrappers)


@check
def the_same_weight_on_both() -> None:
    models = nets()
    first, second = (DDP(model) for model in models)
    weights = [3.0, 5.0]
    mine = weights[dist.get_rank()]
    with first.weighted(mine), second.weighted(mine):
        check_steps(models, [first, second], weights=weights)


@check
def no_sync_on_one_of_them() -> None:
    """The one that synchronises averages all of what is shared; the other's own stays local."""
    models = nets()
    plain, local = copy.deepcopy(models), copy.deepcopy(models)
    first, second = (DDP(model) for model in models)
    for step in range(3):
        for each in (models, plain, local):
            each.zero_grad()
        with second.no_sync():
            total([first, second], step).backward()
        backward_alone(plain, step)
        total(list(local), step).backward()
        expected = gradients(plain) | {
            name: value for name, value in gradients(local).items() if name.startswith("1.own")
        }
        assert_close(gradients(models), expected)


@check
def a_retained_graph() -> None:
    models = nets()
    plain = copy.deepcopy(models)
    first, second = (DDP(model) for model in models)
    for step in range(2):
        models.zero_grad()
        plain.zero_grad()
        loss = total([first, second], step)
        loss.backward(retain_graph=True)
        loss.backward()
        for _ in range(2):
            backward_alone(plain, step)
        assert_close(gradients(models), gradients(plain))


@check.each({}, UNUSED, STATIC)
def two_forwards_then_two_backwards(options: dict[str, bool]) -> None:
    """The second wrapper leaves gradients of the first one's backward alone."""
    models = nets()
    plain = copy.deepcopy(models)
    first, second = (DDP(model, **options) for model in models)
    for step in range(3):
        models.zero_grad()
        plain.zero_grad()
        losses = [loss_of(first, 0, step), loss_of(second, 1, step)]
        for loss in losses:
            loss.backward()
        backward_alone(plain, step)
        assert_close(gradients(models), gradients(plain))


@check
def an_optimizer_in_the_backward_steps_once() -> None:
    models = nets()
    plain = copy.deepcopy(models)
    _apply_optimizer_in_backward(torch.optim.SGD, models.parameters(), {"lr": 0.1})
    wrappers = [DDP(model, bucket_cap_mb=1e-5) for model in models]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        plain.zero_grad()
        total(wrappers, step).backward()
        backward_alone(plain, step)
        optimizer.step()
        for (name, ours), theirs in zip(models.named_parameters(), plain.parameters(), strict=True):
            assert ours.grad is None
            torch.testing.assert_close(ours, theirs, msg=lambda m, n=name: f"{n}: {m}")


@check
def a_step_that_one_leaves_out_is_left_out_of_what_is_shared() -> None:
    """Whichever of the two ends last."""

    class Spoiled(Net):
        """The gradient of its own bias is NaN, no other is."""

        spoils = False

        def forward(self, x: Tensor) -> Tensor:
            factor = math.nan if self.spoils else 1.0
            self.own.bias.register_hook(lambda gradient: gradient * factor)
            return super().forward(x)

    for spoiled in (0, 1):
        torch.manual_seed(0)
        part = nn.Linear(WIDTH, WIDTH)
        models = nn.ModuleList(Spoiled(part) for _ in range(2))
        models[spoiled].spoils = dist.get_rank() == 1
        wrappers = [DDP(model, nonfinite="skip") for model in models]
        total(wrappers, 0).backward()
        assert [w.skipped_steps for w in wrappers] == [1 - spoiled, spoiled]
        found: Gradients = gradients(models)
        for name, value in found.items():
            is_zero = name.startswith(("0.shared", f"{spoiled}."))
            assert (value.abs().sum() == 0) == is_zero, name


@check
def a_backward_that_raised_is_not_waited_for() -> None:
    """The other wrapper's step of a backward that is gone shows nothing any more."""

    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(_: Any, __: Tensor) -> Tensor:
            raise ValueError("on purpose")

    models = nets()
    plain = copy.deepcopy(models)
    first, second = (DDP(model) for model in models)
    x = batch(0).requires_grad_()
    with pytest.raises(ValueError, match="on purpose"):
        first(Raises.apply(x)).square().mean().backward()
    models.zero_grad()
    loss_of(second, 1, 0).backward()
    for rank in range(dist.get_world_size()):
        (loss_of(plain[1], 1, 0, rank) / dist.get_world_size()).backward()
    assert_close(gradients(models[1]), gradients(plain[1]))


# --- the tests -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return check.run(2)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", check.names)
def test_two_ranks(outcomes: Outcomes, name: str) -> None:
    assert_passed(outcomes, name)


@pytest.mark.slow
def test_three_ranks() -> None:
    run_ranks(3, on_all_transports)


def on_all_transports() -> None:
    for transport in ("shm", "c10d"):
        two_wrappers_in_one_backward(transport)
