"""Contexts of distributed autograd: in a row, with no_sync, join, several wrappers, faults."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn
from torch.distributed import rpc

from paceline import DistributedDataParallel as DDP
from paceline.testing import run_ranks
from tests.ddp.compare import (
    assert_close,
    assert_identical,
    batch,
    pair,
    reference_gradients,
)
from tests.ddp.models import Bag, mlp, seeded
from tests.ddp.rpc.over_rpc import in_context, named, with_rpc

pytestmark = pytest.mark.skipif(
    not rpc.is_available(), reason="this build of torch has no torch.distributed.rpc"
)


def loss_of(model: nn.Module, step: int, rank: int | None = None) -> Tensor:
    return model(batch(step, rank)).square().mean()


def mean_over_ranks(values: dict[str, Tensor]) -> dict[str, Tensor]:
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, values)
    return {name: sum(v[name] for v in everybody) / len(everybody) for name in values}


def test_gradients_of_one_context_do_not_reach_the_next() -> None:
    def check() -> None:
        ours, theirs = pair(mlp(4), bucket_cap_mb=1e-4)
        for step in range(4):
            found = in_context(ours, lambda s=step: loss_of(ours, s))
            assert_identical(found, in_context(theirs, lambda s=step: loss_of(theirs, s)))
            assert_close(found, reference_gradients(ours, lambda m, r, s=step: loss_of(m, s, r)))

    run_ranks(2, with_rpc, check)


def test_two_contexts_open_at_once() -> None:
    """The gradients of the first stay what they were while the second is used."""

    def check() -> None:
        ddp = DDP(mlp(4))
        with dist_autograd.context() as outer:
            dist_autograd.backward(outer, [loss_of(ddp, 0)])
            first = named(ddp, outer)
            # torch refuses to nest contexts on one thread: what is open is only not cleaned up yet.
            held = dict(dist_autograd.get_gradients(outer))
        second = in_context(ddp, lambda: loss_of(ddp, 1))
        names = {parameter: name for name, parameter in ddp.module.named_parameters()}
        assert_identical({names[p]: g for p, g in held.items()}, first)
        assert_close(second, reference_gradients(ddp, lambda m, r: loss_of(m, 1, r)))

    run_ranks(2, with_rpc, check)


def test_no_sync() -> None:
    """Inside of no_sync gradients stay local; the next backward in the same context reduces all."""

    def check() -> None:
        ddp, plain = DDP(mlp(4), bucket_cap_mb=1e-4), mlp(4)
        rank = dist.get_rank()
        for step in range(3):
            with ddp.no_sync():
                local = in_context(ddp, lambda s=step: loss_of(ddp, s))
            mine = in_context(plain, lambda s=step: loss_of(plain, s, rank))
            assert_close(local, mine, "inside of no_sync:")
            with dist_autograd.context() as context:
                with ddp.no_sync():
                    dist_autograd.backward(context, [loss_of(ddp, 10 + step)])
                dist_autograd.backward(context, [loss_of(ddp, 20 + step)])
                both = named(ddp, context)
            summed = in_context(
                plain,
                lambda s=step: loss_of(plain, 10 + s, rank),
                lambda s=step: loss_of(plain, 20 + s, rank),
            )
            assert_close(both, mean_over_ranks(summed), "after no_sync:")

    run_ranks(2, with_rpc, check)


def test_several_wrappers_in_one_context() -> None:
    """Two in a chain and one beside them, with a loss that goes through all."""

    def check() -> None:
        parts = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
        for seed, part in enumerate(parts):
            torch.manual_seed(seed)
            part.reset_parameters()
        plain = nn.ModuleList(parts)
        wrapped = nn.ModuleList(DDP(part) for part in parts)

        def loss(models: nn.ModuleList, step: int, rank: int | None = None) -> Tensor:
            x = batch(step, rank)
            return (models[1](models[0](x).tanh()) * models[2](x)).square().mean()

        for step in range(3):
            found = in_context(plain, lambda s=step: loss(wrapped, s))
            expected = reference_gradients(plain, lambda m, r, s=step: loss(m, s, r))
            assert_close(found, expected)

    run_ranks(2, with_rpc, check)


def train_unevenly(ddp: nn.Module, step_of: Any) -> None:
    """Rank r has 2 + 2 r inputs, each in a context of its own; a plain SGD step after each."""
    with ddp.join():
        for step in range(2 + 2 * dist.get_rank()):
            with dist_autograd.context() as context:
                dist_autograd.backward(context, [step_of(ddp, step)])
                with torch.no_grad():
                    for parameter, gradient in dist_autograd.get_gradients(context).items():
                        parameter.sub_(0.1 * gradient.to_dense())


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_uneven_inputs(kind: str) -> None:
    def tokens(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        return torch.randint(12, (3, 4), generator=generator)

    def check() -> None:
        if kind == "dense":
            ours, theirs = pair(mlp(4), bucket_cap_mb=1e-4)
            step_of: Any = loss_of
        else:
            ours, theirs = pair(seeded(Bag))
            step_of = lambda model, step: model(tokens(step)).square().mean()  # noqa: E731
        for ddp in (ours, theirs):
            train_unevenly(ddp, step_of)
        assert_close(dict(ours.module.state_dict()), dict(theirs.module.state_dict()))

    run_ranks(2, with_rpc, check)


def test_sparse_equals_torch() -> None:
    def check() -> None:
        torch.manual_seed(0)
        ours, theirs = pair(nn.EmbeddingBag(10, 3, sparse=True, mode="sum"))
        for step in range(3):
            torch.manual_seed(7 * step + dist.get_rank())
            indices, offsets = torch.randint(10, (8,)), torch.tensor([0, 3])
            found, expected = (
                in_context(ddp, lambda d=ddp, i=indices, o=offsets: d(i, o).square().sum())
                for ddp in (ours, theirs)
            )
            assert_close(found, expected)

    run_ranks(2, with_rpc, check)


class Owned(nn.Module):
    """Its output is a reference to a tensor that it owns."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return rpc.RRef(self.linear(x).tanh())


def take(rref: Any) -> Tensor:
    """Runs on another rank, which fetches the tensor from its owner."""
    value: Tensor = rref.to_here()
    return value.square()


def test_rref_outputs_in_a_context() -> None:
    """The loss is computed from the reference: here, and by another rank that fetches it."""

    def check() -> None:
        ours, theirs = pair(seeded(Owned))
        other = f"rank{1 - dist.get_rank()}"
        for step in range(3):
            found, expected = (
                in_context(d, lambda d=d, s=step: d(batch(s)).local_value().square().mean())
                for d in (ours, theirs)
            )
            assert_identical(found, expected)
            found, expected = (
                in_context(
                    d,
                    lambda d=d, s=step: rpc.rpc_sync(other, take, args=(d(batch(s)),)).mean(),
                )
                for d in (ours, theirs)
            )
            assert_identical(found, expected)
            reference = reference_gradients(
                ours, lambda m, r, s=step: m(batch(s, r)).local_value().square().mean()
            )
            assert_close(found, reference)

    run_ranks(2, with_rpc, check)


class RemoteTrouble(Exception):
    """What the remote functions raise here."""


def remote_forward(x: Tensor, fails: bool) -> Tensor:
    if fails:
        raise RemoteTrouble("in forward")
    return x.square()


class _FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, __: Tensor) -> Tensor:
        raise RemoteTrouble("in backward")


def remote_backward(x: Tensor, fails: bool) -> Tensor:
    return _FailsBackward.apply(x).square() if fails else x.square()


@pytest.mark.parametrize("function", [remote_forward, remote_backward])
def test_an_exception_in_a_remote_function(function: Any) -> None:
    """Rank 0's remote call fails in one step; the steps before and after are right everywhere."""

    def check() -> None:
        rank = dist.get_rank()
        ddp = DDP(mlp(4), bucket_cap_mb=1e-4)
        other = f"rank{1 - rank}"

        def loss(step: int, fails: bool = False) -> Tensor:
            return rpc.rpc_sync(other, function, args=(ddp(batch(step)), fails)).mean()

        def check_step(step: int) -> None:
            expected = reference_gradients(ddp, lambda m, r, s=step: m(batch(s, r)).square().mean())
            assert_close(in_context(ddp, lambda: loss(step)), expected)

        check_step(0)
        if rank == 0:
            with pytest.raises(Exception, match=r"in (for|back)ward"):
                in_context(ddp, lambda: loss(1, fails=True))
        for step in (1, 2, 3):
            check_step(step)

    run_ranks(2, with_rpc, check)


class Through(nn.Module):
    """Two layers with a remote function between them, which may fail in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, fails: bool, other: str | None = None) -> Tensor:
        x = self.first(x)
        x = rpc.rpc_sync(other, remote_backward, args=(x, fails)) if other else x.square()
        return self.second(x)


def test_an_exception_in_the_middle_of_a_step() -> None:
    """Rank 0's backward fails when half of the gradients are there: rank 1 is told, both go on."""

    def check() -> None:
        rank = dist.get_rank()
        other = f"rank{1 - rank}"
        ddp = DDP(seeded(Through))

        def loss(step: int, fails: bool = False) -> Tensor:
            return ddp(batch(step), fails, other).square().mean()

        def check_step(step: int) -> None:
            expected = reference_gradients(
                ddp, lambda m, r, s=step: m(batch(s, r), False).square().mean()
            )
            assert_close(in_context(ddp, lambda: loss(step)), expected)

        check_step(0)
        told = "in backward" if rank == 0 else "rank 0: its backward"
        with pytest.raises(RuntimeError, match=told):
            in_context(ddp, lambda: loss(1, fails=rank == 0))
        for step in (2, 3):
            check_step(step)

    run_ranks(2, with_rpc, check)
