"""Distributed autograd: inside a context, gradients land reduced in the context."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn
from torch.distributed import rpc

from paceline import DistributedDataParallel as DDP
from paceline.testing import run_ranks
from tests.ddp.compare import assert_close, assert_identical, batch, gradients, reference_gradients
from tests.ddp.models import Bag, Branches, mlp, seeded

pytestmark = pytest.mark.skipif(
    not rpc.is_available(), reason="this build of torch has no torch.distributed.rpc"
)


def with_rpc(check: Callable[[], None]) -> None:
    """Run ``check`` on every rank with RPC over loopback."""
    # RPC builds on parts of torch that are deprecated.
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", "You are using a Backend")
    rank, world = dist.get_rank(), dist.get_world_size()
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=os.environ["PACELINE_TEST_INIT_METHOD"] + "_rpc",
        _transports=["uv"],
        _channels=["basic"],
    )
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=world, rpc_backend_options=options)
    try:
        check()
        dist.barrier()
    finally:
        rpc.shutdown()


def in_context(ddp: DDP, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
    """Run a backward in a context; return its gradients by name."""
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [loss()])
        found = dist_autograd.get_gradients(context)
        names = {parameter: name for name, parameter in ddp.module.named_parameters()}
        return {names[p]: g.to_dense().clone() for p, g in found.items() if p in names}


def test_dense() -> None:
    def check() -> None:
        ddp = DDP(mlp(4), bucket_cap_mb=1e-4)
        for step in range(3):
            found = in_context(ddp, lambda s=step: ddp(batch(s)).square().mean())
            assert all(p.grad is None for p in ddp.parameters()), "nothing outside of the context"
            expected = reference_gradients(
                ddp, lambda m, rank, s=step: m(batch(s, rank)).square().mean()
            )
            assert_close(found, expected)

    run_ranks(2, with_rpc, check)


def test_sparse() -> None:
    def tokens(step: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * step + rank)
        return torch.randint(12, (3, 4), generator=generator)

    def check() -> None:
        ddp = DDP(seeded(Bag))
        for step in range(3):
            mine = tokens(step, dist.get_rank())
            found = in_context(ddp, lambda mine=mine: ddp(mine).square().mean())
            expected = reference_gradients(
                ddp, lambda m, rank, s=step: m(tokens(s, rank)).square().mean()
            )
            assert_close(found, expected)

    run_ranks(2, with_rpc, check)


def test_unused_parameters() -> None:
    def check() -> None:
        torch.manual_seed(0)
        ddp = DDP(Branches(), find_unused_parameters=True)
        for step in range(3):
            found = in_context(ddp, lambda s=step: ddp(batch(s), "ab").mean())
            expected = reference_gradients(ddp, lambda m, r, s=step: m(batch(s, r), "ab").mean())
            used = {name: value for name, value in expected.items() if value is not None}
            assert_close(found, used)

    run_ranks(2, with_rpc, check)


def test_outside_and_inside_by_turns() -> None:
    def check() -> None:
        ddp, plain = DDP(mlp(4)), DDP(mlp(4))
        for step in range(4):
            for each in (ddp, plain):
                each.zero_grad()
            plain(batch(step)).square().mean().backward()
            if step % 2:
                found = in_context(ddp, lambda s=step: ddp(batch(s)).square().mean())
            else:
                ddp(batch(step)).square().mean().backward()
                found = gradients(ddp)
            assert_identical(found, gradients(plain))

    run_ranks(2, with_rpc, check)


class GivesRRef(nn.Module):
    """Its output is a reference to a tensor that it owns."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> rpc.RRef[Tensor]:
        return rpc.RRef(self.used(x).tanh())


def test_rref_outputs() -> None:
    def check() -> None:
        ddp = DDP(seeded(GivesRRef), find_unused_parameters=True)
        for step in range(3):
            ddp.zero_grad()
            ddp(batch(step)).local_value().square().mean().backward()
            found = gradients(ddp)
            expected = reference_gradients(
                ddp, lambda m, rank, s=step: m(batch(s, rank)).local_value().square().mean()
            )
            assert_close(found, expected)
            assert found["unused.weight"] is None

    run_ranks(2, with_rpc, check)


def remote_square(x: Tensor) -> Tensor:
    return x.square()


def test_a_remote_part_behind_the_wrapper() -> None:
    """The loss goes through the other rank: autograd comes back over RPC into our buckets."""

    def check() -> None:
        ddp = DDP(mlp(4))
        other = f"rank{1 - dist.get_rank()}"
        for step in range(3):
            found = in_context(
                ddp,
                lambda s=step: rpc.rpc_sync(other, remote_square, args=(ddp(batch(s)),)).mean(),
            )
            expected = reference_gradients(
                ddp, lambda m, rank, s=step: m(batch(s, rank)).square().mean()
            )
            assert_close(found, expected)

    run_ranks(2, with_rpc, check)
