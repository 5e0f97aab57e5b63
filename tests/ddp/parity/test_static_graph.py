"""static_graph: the first step teaches the graph; checkpointing, repeated use, unused parts."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline import DistributedDataParallel as DDP
from paceline.errors import AlreadyTrainingError
from paceline.testing import run_ranks
from tests.ddp.compare import (
    assert_close,
    assert_identical,
    assert_sum_over_batches,
    batch,
    gradients,
    pair,
    reference_gradients,
    step_both,
    train_both,
)
from tests.ddp.models import Branches, Tied, mlp, seeded

STATIC = {"static_graph": True}
VIEWS = [None, True, False]


class Checkpointed(nn.Module):
    """Two layers, checkpointed once or twice, in one of the two ways."""

    def __init__(self, *, reentrant: bool, times: int = 1, shared: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        if shared:
            self.second.weight = self.first.weight
        self.reentrant = reentrant
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = checkpoint(self.second, x, use_reentrant=self.reentrant).tanh()
        return x


def compare_steps(model: nn.Module, steps: int = 4, **options: object) -> None:
    ours, theirs = pair(model, **options)
    for step in range(steps):
        found = step_both(ours, theirs, lambda m, s=step: m(batch(s)).square().mean())
        expected = reference_gradients(ours, lambda m, r, s=step: m(batch(s, r)).square().mean())
        assert_close(found, expected, f"step {step}:")


@pytest.mark.parametrize("views", VIEWS)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant: bool, views: bool | None) -> None:
    def on_rank() -> None:
        for times in (1, 2):
            for shared in (False, True):
                torch.manual_seed(0)
                model = Checkpointed(reentrant=reentrant, times=times, shared=shared)
                compare_steps(model, gradient_as_bucket_view=views, bucket_cap_mb=1e-4, **STATIC)

    run_ranks(2, on_rank)


def test_reentrant_checkpointing_once_needs_no_static_graph() -> None:
    def on_rank() -> None:
        torch.manual_seed(0)
        compare_steps(Checkpointed(reentrant=True))
        compare_steps(Checkpointed(reentrant=False), find_unused_parameters=True)

    run_ranks(2, on_rank)


def test_checkpointing_with_unused_parameters() -> None:
    class WithUnused(Checkpointed):
        def __init__(self) -> None:
            super().__init__(reentrant=True, times=2)
            self.unused = nn.Linear(4, 4)

    def on_rank() -> None:
        compare_steps(seeded(WithUnused), **STATIC)
        # torch says that one of the two flags is enough.
        warnings.filterwarnings("ignore", "You passed find_unused_parameters=true")
        compare_steps(seeded(WithUnused), find_unused_parameters=True, **STATIC)

    run_ranks(2, on_rank)


def test_parameters_used_several_times() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(5):
                x = self.cell(x).tanh()
            return x

    def on_rank() -> None:
        compare_steps(seeded(Recurrent), **STATIC)
        compare_steps(seeded(Tied), **STATIC)

    run_ranks(2, on_rank)


def test_unused_parameters_are_learnt() -> None:
    def on_rank() -> None:
        torch.manual_seed(0)
        ours, theirs = pair(Branches(), bucket_cap_mb=1e-4, **STATIC)
        for step in range(4):
            found = step_both(ours, theirs, lambda m, s=step: m(batch(s), "ac").mean())
            assert found["branches.b.weight"] is None

    run_ranks(2, on_rank)


def test_other_unused_parameters_on_every_rank() -> None:
    def on_rank() -> None:
        torch.manual_seed(0)
        ours, theirs = pair(Branches(), **STATIC)
        names = ["ab", "bc"]
        for step in range(4):
            mine = names[dist.get_rank()]
            found = step_both(ours, theirs, lambda m, s=step, n=mine: m(batch(s), n).mean())
            expected = reference_gradients(
                ours, lambda m, rank, s=step: m(batch(s, rank), names[rank]).mean()
            )
            assert_close(found, expected)

    run_ranks(2, on_rank)


def test_set_static_graph_later() -> None:
    def on_rank() -> None:
        torch.manual_seed(0)
        model = Checkpointed(reentrant=True, times=2)
        ours, theirs = pair(model)
        for ddp in (ours, theirs):
            ddp._set_static_graph()
            assert ddp.static_graph
        train_both(ours, theirs)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            ours._set_static_graph()
        assert len(seen) == 1
        late = DDP(mlp(4))
        late(batch(0)).mean().backward()
        with pytest.raises(AlreadyTrainingError, match="before training loop starts"):
            late._set_static_graph()

    run_ranks(2, on_rank)


def test_no_sync_before_the_first_synchronised_step() -> None:
    """torch asserts here; the local gradients are part of the sum all the same."""

    def on_rank() -> None:
        ddp = DDP(mlp(4), **STATIC)
        for step in range(3):
            ddp.zero_grad()
            with ddp.no_sync():
                ddp(batch(10 * step)).square().mean().backward()
            ddp(batch(10 * step + 1)).square().mean().backward()
            assert_sum_over_batches(ddp, (10 * step, 10 * step + 1))

    run_ranks(2, on_rank)


def test_buckets_follow_the_order_of_arrival_after_learning() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(self.b(x))

    def on_rank() -> list[tuple[str, ...]]:
        ddp = DDP(seeded(Backwards), bucket_cap_mb=1e-6, **STATIC)
        for step in range(3):
            ddp.zero_grad()
            ddp(batch(step)).mean().backward()
        return [bucket.parameters for bucket in ddp.stats().buckets]

    expected = [("a.weight",), ("b.weight",)]
    assert run_ranks(2, on_rank) == [expected] * 2


@pytest.mark.parametrize("views", VIEWS)
def test_accumulating_without_zero_grad(views: bool | None) -> None:
    def on_rank() -> None:
        torch.manual_seed(0)
        model = Checkpointed(reentrant=True, times=2)
        ours, theirs = pair(model, gradient_as_bucket_view=views, **STATIC)
        train_both(ours, theirs, 4, zero=False)

    run_ranks(2, on_rank)


def test_evaluation_between_steps_teaches_nothing() -> None:
    def on_rank() -> None:
        plain = mlp(4)
        ddp, other = DDP(copy.deepcopy(plain), **STATIC), DDP(copy.deepcopy(plain), **STATIC)
        for step in range(3):
            for model in (ddp, other):
                model.zero_grad()
            ddp.eval()
            with torch.no_grad():
                ddp(batch(99))
            ddp.train()
            for model in (ddp, other):
                model(batch(step)).square().mean().backward()
            assert_identical(gradients(ddp), gradients(other))

    run_ranks(2, on_rank)
