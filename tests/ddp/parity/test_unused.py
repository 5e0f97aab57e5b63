"""Parameters that a backward does not reach: found, averaged, or left alone bit for bit."""

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
    assert_identical,
    assert_same_on_all_ranks,
    batch,
    gradients,
    pair,
    reference_gradients,
    step_both,
    train_both,
)
from tests.ddp.models import Branches, Structured, Tied, mlp, seeded

VIEWS = [None, True, False]
UNUSED = {"find_unused_parameters": True}


def branches(names: str = "abc") -> Branches:
    torch.manual_seed(0)
    return Branches(names)


@pytest.mark.parametrize("views", VIEWS)
def test_used_on_one_rank_only_gets_the_average(views: bool | None) -> None:
    uses = [["ab", "ac"], ["b", "b"], ["abc", "a"], ["c", "ab"]]

    def on_rank() -> None:
        ours, theirs = pair(branches(), gradient_as_bucket_view=views, bucket_cap_mb=1e-4, **UNUSED)
        for step, names in enumerate(uses):
            mine = names[dist.get_rank()]
            found = step_both(ours, theirs, lambda m, s=step, n=mine: m(batch(s), n).mean())
            expected = reference_gradients(
                ours, lambda m, rank, s=step, n=names: m(batch(s, rank), n[rank]).mean()
            )
            assert_close(found, expected, f"step {step}:")
            assert_same_on_all_ranks(found)

    run_ranks(2, on_rank)


@pytest.mark.parametrize("views", VIEWS)
@pytest.mark.parametrize("options", [UNUSED, {"static_graph": True}])
def test_globally_unused_keeps_none(views: bool | None, options: dict[str, bool]) -> None:
    def on_rank() -> None:
        ours, theirs = pair(branches(), gradient_as_bucket_view=views, **options)
        for step in range(3):
            found = step_both(ours, theirs, lambda m, s=step: m(batch(s), "ab").mean())
            assert found["branches.c.weight"] is None

    run_ranks(2, on_rank)


@pytest.mark.parametrize("views", VIEWS)
def test_globally_unused_keeps_its_old_value_bit_for_bit(views: bool | None) -> None:
    """Also when the old value differs between ranks, or is NaN: nobody touches it."""

    def on_rank() -> None:
        model = branches()
        ddp = DDP(model, gradient_as_bucket_view=views, **UNUSED)
        own = torch.full((4, 4), 1 / 3 + dist.get_rank())
        own[0, 0], own[0, 1] = float("nan"), -0.0
        for step in range(3):
            ddp.zero_grad()
            model.branches["c"].weight.grad = own.clone()
            ddp(batch(step), "ab").mean().backward()
            found = {"c": model.branches["c"].weight.grad}
            assert_identical(found, {"c": own})
            expected = reference_gradients(
                ddp, lambda m, rank, s=step: m(batch(s, rank), "ab").mean()
            )
            others = {n: g for n, g in gradients(ddp).items() if n != "branches.c.weight"}
            expected.pop("branches.c.weight")
            assert_close(others, expected)

    run_ranks(2, on_rank)


@pytest.mark.parametrize("views", VIEWS)
def test_globally_unused_keeps_what_a_user_wrote_into_it(views: bool | None) -> None:
    """The gradient lies in the bucket, which is reduced, and differs between ranks."""

    def on_rank() -> None:
        model = branches()
        ddp = DDP(model, gradient_as_bucket_view=views, **UNUSED)
        ddp(batch(0), "abc").mean().backward()
        weight = model.branches["c"].weight
        own = torch.full((4, 4), 1 / 3 + dist.get_rank())
        own[0, 0] = float("inf")
        weight.grad.copy_(own)
        for step in range(1, 4):
            ddp(batch(step), "ab").mean().backward()
            assert_identical({"c": weight.grad}, {"c": own}, f"step {step}:")

    run_ranks(2, on_rank)


@pytest.mark.parametrize("views", VIEWS)
def test_old_average_stays_while_unused_without_zero_grad(views: bool | None) -> None:
    def on_rank() -> None:
        ours, theirs = pair(branches(), gradient_as_bucket_view=views, **UNUSED)
        for step, names in enumerate(["abc", "ab", "a", "abc", "bc"]):
            before = gradients(ours)
            loss = lambda m, s=step, n=names: m(batch(s), n).mean()  # noqa: E731
            found = step_both(ours, theirs, loss, zero=False)
            for name, value in before.items():
                if name.split(".")[1] not in names:
                    assert_identical({name: found[name]}, {name: value})

    run_ranks(2, on_rank)


def test_all_parameters_unused_on_one_rank() -> None:
    """Its loss hangs on its input alone. torch's DDP leaves such a rank without the average."""

    def on_rank() -> None:
        ddp = DDP(branches(), **UNUSED)
        uses = ["ab", ""]
        for step in range(3):
            ddp.zero_grad()
            names = uses[(dist.get_rank() + step) % 2]
            ddp(batch(step).requires_grad_(), names).mean().backward()
            found = gradients(ddp)
            expected = reference_gradients(
                ddp, lambda m, rank, s=step: m(batch(s, rank), uses[(rank + s) % 2]).mean()
            )
            assert_close(found, expected)
            assert found["branches.c.weight"] is None

    run_ranks(2, on_rank)


def test_outputs_in_containers_and_dataclasses() -> None:
    def on_rank() -> None:
        ours, theirs = pair(seeded(Structured), **UNUSED)

        def loss(model: nn.Module, step: int) -> Tensor:
            answer = model(batch(step))
            return answer.main.sum() + answer.extra["list"][0][0].square().sum()

        for step in range(3):
            found = step_both(ours, theirs, lambda m, s=step: loss(m, s))
            assert found["deep.weight"] is not None
            assert found["unused.weight"] is None

    run_ranks(2, on_rank)


def test_an_output_that_does_not_enter_the_loss() -> None:
    """torch walks the graph from the outputs and waits for ever; the engine knows better."""

    def on_rank() -> None:
        ddp = DDP(seeded(Structured), **UNUSED)
        for step in range(3):
            ddp.zero_grad()
            ddp(batch(step)).main.sum().backward()
            found = gradients(ddp)
            expected = reference_gradients(ddp, lambda m, r, s=step: m(batch(s, r)).main.sum())
            assert_close(found, expected)
            assert found["deep.weight"] is None

    run_ranks(2, on_rank)


def test_a_shared_weight_is_used_if_one_of_its_names_is() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tied = Tied()

        def forward(self, x: Tensor) -> Tensor:
            return self.tied.second(x)

    def on_rank() -> None:
        ours, theirs = pair(seeded(Half), **UNUSED)
        for step in range(3):
            found = step_both(ours, theirs, lambda m, s=step: m(batch(s)).mean())
            assert found["tied.first.weight"] is not None
            assert found["tied.first.bias"] is None

    run_ranks(2, on_rank)


@pytest.mark.parametrize("options", [{}, {"batched_grad_copy": True}])
def test_skip_all_reduce_unused_params(options: dict[str, bool]) -> None:
    """Buckets in which nothing is used are not sent; numbers are the same."""

    def on_rank() -> tuple[list[int], list[int]]:
        options_ = {"bucket_cap_mb": 1e-6, **UNUSED, **options}
        ours, theirs = pair(branches(), skip_all_reduce_unused_params=True, **options_)
        full = DDP(branches(), **options_)
        sent, sent_without = [], []
        for step, names in enumerate(["ab", "c", "abc"]):
            found = step_both(ours, theirs, lambda m, s=step, n=names: m(batch(s), n).mean())
            full.zero_grad()
            full(batch(step), names).mean().backward()
            assert_identical(found, gradients(full))
            sent.append(ours._get_ddp_logging_data()["num_buckets_reduced"])
            sent_without.append(full._get_ddp_logging_data()["num_buckets_reduced"])
        return sent, sent_without

    for sent, without in run_ranks(2, on_rank):
        assert sent == [4, 2, 6]
        assert without == [6, 6, 6]


@pytest.mark.parametrize("views", VIEWS)
def test_batched_grad_copy(views: bool | None) -> None:
    def on_rank() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 400), nn.Linear(400, 100), nn.Linear(100, 1))
        one = DDP(copy.deepcopy(model), gradient_as_bucket_view=views)
        ours, theirs = pair(model, gradient_as_bucket_view=views, batched_grad_copy=True)
        for step in range(3):
            found = step_both(ours, theirs, lambda m, s=step: m(batch(s)).square().mean())
            one.zero_grad()
            one(batch(step)).square().mean().backward()
            assert_identical(found, gradients(one))

    run_ranks(2, on_rank)


def test_find_unused_on_a_model_that_uses_everything() -> None:
    def on_rank() -> None:
        ours, theirs = pair(mlp(4), bucket_cap_mb=1e-4, **UNUSED)
        train_both(ours, theirs)

    run_ranks(2, on_rank)


def test_three_ranks_use_three_different_branches() -> None:
    def on_rank() -> None:
        ddp = DDP(branches(), **UNUSED)
        for step in range(3):
            ddp.zero_grad()
            ddp(batch(step), "abc"[dist.get_rank()]).mean().backward()
            expected = reference_gradients(
                ddp, lambda m, rank, s=step: m(batch(s, rank), "abc"[rank]).mean()
            )
            assert_close(gradients(ddp), expected)
            assert_same_on_all_ranks(gradients(ddp))

    run_ranks(3, on_rank)
