"""functional_call: tensors made from our parameters are averaged, others are left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from paceline import DistributedDataParallel as DDP
from paceline.testing import run_ranks
from tests.ddp.compare import (
    TorchDDP,
    assert_close,
    assert_identical,
    assert_same_on_all_ranks,
    batch,
    gradients,
    reference_gradients,
)
from tests.ddp.models import mlp

Lend = Callable[[nn.Module], dict[str, Tensor]]

MADE_FROM_OURS: dict[str, Lend] = {
    "times one": lambda ddp: {name: p * 1.0 for name, p in ddp.named_parameters()},
    "cloned": lambda ddp: {name: p.clone() for name, p in ddp.named_parameters()},
    "one of them": lambda ddp: {n: p * 1.0 for n, p in list(ddp.named_parameters())[:1]},
    "a step of gradient descent": lambda ddp: descended(ddp),
    "the parameters themselves": lambda ddp: dict(ddp.named_parameters()),
}


def descended(ddp: nn.Module) -> dict[str, Tensor]:
    """An inner step, as in meta-learning, with local gradients."""
    parameters = dict(ddp.named_parameters())
    inner = ddp.module(batch(99)).square().mean()
    steps = torch.autograd.grad(inner, list(parameters.values()), create_graph=True)
    return {n: p - 0.1 * g for (n, p), g in zip(parameters.items(), steps, strict=True)}


def lent_loss(ddp: nn.Module, lend: Lend, step: int) -> Tensor:
    return functional_call(ddp, lend(ddp), (batch(step),)).square().mean()


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("how", MADE_FROM_OURS)
def test_made_from_ours_is_averaged_as_torch_does(how: str, transport: str) -> None:
    def on_rank() -> None:
        lend = MADE_FROM_OURS[how]
        model = mlp(4)
        ours, theirs = DDP(copy.deepcopy(model), transport=transport), TorchDDP(model)
        for step in range(3):
            for ddp in (ours, theirs):
                ddp.zero_grad()
                lent_loss(ddp, lend, step).backward()
            assert_same_on_all_ranks(gradients(ours))
            if transport == "c10d" or dist.get_world_size() == 2:
                assert_identical(gradients(ours), gradients(theirs))
            assert_close(gradients(ours), gradients(theirs))
        ours.zero_grad()
        ours(batch(7)).square().mean().backward()  # with its own parameters again
        expected = reference_gradients(ours, lambda m, rank: m(batch(7, rank)).square().mean())
        assert_close(gradients(ours), expected)

    run_ranks(2, on_rank)


def test_three_ranks_and_no_sync() -> None:
    def on_rank() -> None:
        lend = MADE_FROM_OURS["times one"]
        model = mlp(4)
        ours, theirs = DDP(copy.deepcopy(model)), TorchDDP(model)
        for ddp in (ours, theirs):
            with ddp.no_sync():
                lent_loss(ddp, lend, 0).backward()
            lent_loss(ddp, lend, 1).backward()
        assert_same_on_all_ranks(gradients(ours))
        assert_close(gradients(ours), gradients(theirs))

    run_ranks(3, on_rank)


FOREIGN: dict[str, Lend] = {
    "plain": lambda ddp: {n: torch.zeros_like(p) for n, p in ddp.named_parameters()},
    "leaves": lambda ddp: {
        n: p.detach().clone().requires_grad_() for n, p in ddp.named_parameters()
    },
    "another model's parameters": lambda ddp: {
        n: nn.Parameter(p.detach().clone()) for n, p in ddp.named_parameters()
    },
}


@pytest.mark.parametrize("how", FOREIGN)
def test_others_are_left_alone(how: str) -> None:
    """On one rank alone: a reduction would hang. A step that is under way is not disturbed."""

    def on_rank() -> None:
        plain, ddp = mlp(4), DDP(mlp(4))
        ddp(batch(0)).mean().backward()
        ddp.zero_grad()
        value = ddp(batch(1)).square().mean()
        if dist.get_rank() == 0:
            lent = FOREIGN[how](ddp)
            other = functional_call(ddp, lent, (batch(0),)).square().mean()
            if other.requires_grad:
                other.backward()
                expected = functional_call(
                    plain, {n.removeprefix("module."): p for n, p in lent.items()}, (batch(0),)
                )
                found = {n: p.grad.clone() for n, p in lent.items() if p.grad is not None}
                assert len(found) == len(lent)
                for p in lent.values():
                    p.grad = None
                expected.square().mean().backward()
                assert_identical(found, {n: p.grad for n, p in lent.items()})
            assert all(p.grad is None for p in ddp.parameters())
        value.backward()
        expected = reference_gradients(ddp, lambda m, rank: m(batch(1, rank)).square().mean())
        assert_close(gradients(ddp), expected)

    run_ranks(2, on_rank)


def test_a_transform_is_left_alone() -> None:
    """torch.func.grad hands out what it computes: gradients of each rank's own."""

    def on_rank() -> None:
        ddp = DDP(mlp(4))
        parameters = {n: p.detach() for n, p in ddp.named_parameters()}

        def loss(tensors: dict[str, Tensor]) -> Tensor:
            return functional_call(ddp, tensors, (batch(0),)).square().mean()

        found = torch.func.grad(loss)(parameters)
        plain = mlp(4)
        plain(batch(0)).square().mean().backward()
        assert_close({n.removeprefix("module."): g for n, g in found.items()}, gradients(plain))
        assert ddp.stats().steps == 0
        ddp(batch(1)).square().mean().backward()
        expected = reference_gradients(ddp, lambda m, rank: m(batch(1, rank)).square().mean())
        assert_close(gradients(ddp), expected)

    run_ranks(2, on_rank)
