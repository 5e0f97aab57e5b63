"""Several wrappers, several forwards, retained graphs: how users put DDP together."""

from __future__ import annotations

import copy
import warnings
from threading import Thread

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline import DistributedDataParallel as DDP
from paceline.testing import run_ranks
from tests.ddp.compare import (
    TorchDDP,
    assert_close,
    assert_identical,
    assert_same_on_all_ranks,
    assert_sum_over_batches,
    batch,
    gradients,
    pair,
    reference_gradients,
    step_both,
)
from tests.ddp.models import Branches, mlp, seeded

VIEWS = [None, True, False]


class TwoWrapped(nn.Module):
    """A model with two wrapped parts and a part that is not wrapped."""

    def __init__(self, wrap: type) -> None:
        super().__init__()
        self.encoder = wrap(mlp(4, seed=1))
        self.decoder = wrap(mlp(4, seed=2))
        torch.manual_seed(3)
        self.local = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.local(self.encoder(x)))


def test_several_wrappers_in_one_model() -> None:
    def on_rank() -> None:
        ours, theirs = TwoWrapped(DDP), TwoWrapped(TorchDDP)
        for step in range(3):
            for model in (ours, theirs):
                model.zero_grad()
                model(batch(step)).square().mean().backward()
            found = dict(gradients(ours))
            assert_identical(found, gradients(theirs))
            local = found.pop("local.weight"), found.pop("local.bias")
            assert_same_on_all_ranks(found)
            assert local[0] is not None
            others = [None] * dist.get_world_size()
            dist.all_gather_object(others, local[0])
            assert not torch.equal(others[0], others[1]), "what is not wrapped is not reduced"

    run_ranks(2, on_rank)


def test_a_wrapper_inside_a_wrapper() -> None:
    """The inner one reduces, then the outer one does so again: the mean of equal values."""

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            torch.manual_seed(3)
            self.head = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.inner(x))

    def on_rank() -> None:
        ddp = DDP(Outer(DDP(mlp(4))))
        plain = Outer(mlp(4))
        for step in range(3):
            ddp.zero_grad()
            ddp(batch(step)).square().mean().backward()
            expected = reference_gradients(
                plain, lambda m, rank, s=step: m(batch(s, rank)).square().mean()
            )
            found = {
                name.replace("inner.module", "inner"): value
                for name, value in gradients(ddp).items()
            }
            assert_close(found, expected)

    run_ranks(2, on_rank)


@pytest.mark.parametrize("views", VIEWS)
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_several_forwards_before_one_backward(options: dict[str, bool], views: bool | None) -> None:
    def on_rank() -> None:
        ours, theirs = pair(mlp(4), gradient_as_bucket_view=views, **options)

        def loss(model: nn.Module, step: int, rank: int | None = None) -> Tensor:
            outputs = [model(batch(10 * step + number, rank)) for number in range(3)]
            return (outputs[0] * outputs[1]).mean() + outputs[2].square().mean()

        for step in range(3):
            if options.get("find_unused_parameters"):  # torch wants one forward per backward then
                ours.zero_grad()
                loss(ours, step).backward()
                found = gradients(ours)
            else:
                found = step_both(ours, theirs, lambda m, s=step: loss(m, s))
            expected = reference_gradients(ours, lambda m, rank, s=step: loss(m, s, rank))
            assert_close(found, expected)

    run_ranks(2, on_rank)


def test_a_forward_whose_output_is_dropped() -> None:
    def on_rank() -> None:
        ours, theirs = pair(mlp(4))
        for step in range(3):
            for model in (ours, theirs):
                model.zero_grad()
                model(batch(90 + step))
                model(batch(step)).square().mean().backward()
            assert_identical(gradients(ours), gradients(theirs))

    run_ranks(2, on_rank)


@pytest.mark.parametrize("views", VIEWS)
def test_retain_graph(views: bool | None) -> None:
    """Every backward of a synchronised forward reduces: twice the gradient, on all ranks alike.

    (torch reduces the first and adds the second one of each rank to it.)
    """

    def on_rank() -> None:
        ddp = DDP(mlp(4), gradient_as_bucket_view=views)
        for step in range(3):
            ddp.zero_grad()
            value = ddp(batch(step)).square().mean()
            value.backward(retain_graph=True)
            value.backward()
            expected = reference_gradients(
                ddp, lambda m, rank, s=step: 2 * m(batch(s, rank)).square().mean()
            )
            assert_close(gradients(ddp), expected)
            assert_same_on_all_ranks(gradients(ddp))

    run_ranks(2, on_rank)


def test_two_losses_one_after_the_other() -> None:
    """Two forwards, then two backwards, the second forward's first."""

    def on_rank() -> None:
        ddp = DDP(mlp(4))
        for step in range(3):
            ddp.zero_grad()
            first = ddp(batch(2 * step)).square().mean()
            second = ddp(batch(2 * step + 1)).square().mean()
            second.backward()
            first.backward()
            assert_sum_over_batches(ddp, (2 * step, 2 * step + 1))

    run_ranks(2, on_rank)


def test_wrappers_that_share_a_weight() -> None:
    """Weight sharing inside a module under one wrapper, at different depths."""

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, 4)
            self.body = nn.Linear(4, 4)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.body(self.embedding(tokens)).tanh())

    def on_rank() -> None:
        tokens = [torch.arange(4) + dist.get_rank() + step for step in range(3)]
        for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
            ours, theirs = pair(seeded(Language), **options)
            for step in range(3):
                found = step_both(ours, theirs, lambda m, s=step: m(tokens[s]).logsumexp(1).mean())
                assert "head.weight" not in found

    run_ranks(2, on_rank)


def test_a_frozen_part() -> None:
    def on_rank() -> None:
        model = mlp(4)
        model[0].requires_grad_(False)
        ours, theirs = pair(model)
        for step in range(3):
            found = step_both(ours, theirs, lambda m, s=step: m(batch(s)).square().mean())
            assert found["0.weight"] is None

    run_ranks(2, on_rank)


def test_gradient_penalty() -> None:
    """create_graph, and autograd.grad for the inputs, in the middle of a step."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        output = model(x).square().mean()
        (slope,) = torch.autograd.grad(output, x, create_graph=True)
        return output + slope.square().sum()

    def on_rank() -> None:
        ddp = DDP(mlp(4))
        for step in range(3):
            ddp.zero_grad()
            loss(ddp, batch(step)).backward()
            expected = reference_gradients(ddp, lambda m, rank, s=step: loss(m, batch(s, rank)))
            assert_close(gradients(ddp), expected)

    run_ranks(2, on_rank)


def test_create_graph_keeps_gradients_differentiable() -> None:
    def on_rank() -> None:
        warnings.filterwarnings("ignore", "Using backward.* with create_graph=True")
        ddp = DDP(mlp(4))
        for _ in range(2):
            ddp(batch(0)).square().mean().backward(create_graph=True)
            assert all(p.grad.requires_grad for p in ddp.parameters())
            expected = reference_gradients(ddp, lambda m, rank: m(batch(0, rank)).square().mean())
            assert_close(gradients(ddp), expected)
            ddp.zero_grad()  # breaks the cycle that torch warns about

    run_ranks(2, on_rank)


def test_one_rank_evaluates_alone() -> None:
    def on_rank() -> None:
        ours, theirs = pair(mlp(4))
        for step in range(3):
            step_both(ours, theirs, lambda m, s=step: m(batch(s)).square().mean())
            if dist.get_rank() == 0:
                with torch.no_grad():
                    ours(batch(50))
                ours.eval()
                ours(batch(51))
                ours.train()

    run_ranks(2, on_rank)


def test_backward_from_a_thread() -> None:
    def on_rank() -> None:
        ddp = DDP(mlp(4))
        for step in range(3):
            ddp.zero_grad()
            value = ddp(batch(step)).square().mean()
            thread = Thread(target=value.backward)
            thread.start()
            thread.join()
            expected = reference_gradients(
                ddp, lambda m, rank, s=step: m(batch(s, rank)).square().mean()
            )
            assert_close(gradients(ddp), expected)

    run_ranks(2, on_rank)


def test_partial_backward_passes_add_up() -> None:
    """missing_gradients="wait" has torch's timing: each backward may bring some gradients."""

    def on_rank() -> None:
        torch.manual_seed(0)
        model = Branches("ab")
        ours = DDP(copy.deepcopy(model), missing_gradients="wait")
        theirs = TorchDDP(model)
        for step in range(3):
            for ddp in (ours, theirs):
                ddp.zero_grad()
                inner = ddp.module.branches
                ddp(batch(step), "ab")  # begins the step; its own graph is not used
                inner["a"](batch(step)).tanh().sum(dim=1).mean().backward()
                inner["b"](batch(step)).tanh().sum(dim=1).mean().backward()
            assert_identical(gradients(ours), gradients(theirs))
            expected = reference_gradients(
                ours, lambda m, rank, s=step: m(batch(s, rank), "ab").mean()
            )
            assert_close(gradients(ours), expected)

    run_ranks(2, on_rank)


def test_functional_call() -> None:
    """torch.func.functional_call with other tensors: nothing of ours is reduced, nothing breaks."""

    def on_rank() -> None:
        ddp = DDP(mlp(4))
        ddp(batch(0)).mean().backward()
        ddp.zero_grad()
        other = {name: torch.zeros_like(p) for name, p in ddp.named_parameters()}
        with torch.no_grad():
            assert torch.func.functional_call(ddp, other, (batch(0),)).abs().sum() == 0
        ddp(batch(1)).square().mean().backward()
        expected = reference_gradients(ddp, lambda m, rank: m(batch(1, rank)).square().mean())
        assert_close(gradients(ddp), expected)

    run_ranks(2, on_rank)
