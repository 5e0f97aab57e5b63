"""Distributed autograd: inside a context, gradients land reduced in the context."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import rpc

from paceline import DistributedDataParallel as DDP
from paceline.testing import run_ranks
from tests.ddp.compare import assert_close, assert_identical, batch, gradients, reference_gradients
from tests.ddp.models import Bag, Branches, mlp, seeded
from tests.ddp.rpc.over_rpc import in_context, with_rpc

pytestmark = pytest.mark.skipif(
    not rpc.is_available(), reason="this build of torch has no torch.distributed.rpc"
)


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
    """Used by one rank only: the average is in everybody's context. Used by none: zeros are.

    torch's DDP cannot do either: an assertion in its C++ fails.
    """

    def used(rank: int, step: int) -> str:
        return "ab" if (rank + step) % 2 else "a"

    def check() -> None:
        torch.manual_seed(0)
        ddp = DDP(Branches(), find_unused_parameters=True)
        for step in range(3):
            found = in_context(ddp, lambda s=step: ddp(batch(s), used(dist.get_rank(), s)).mean())
            expected = reference_gradients(
                ddp, lambda m, r, s=step: m(batch(s, r), used(r, s)).mean()
            )
            zeros = {n: torch.zeros_like(p) for n, p in ddp.module.named_parameters()}
            assert_close(found, {n: zeros[n] if g is None else g for n, g in expected.items()})

    run_ranks(2, with_rpc, check)


class TwoBags(nn.Module):
    """Looks up in one of two sparse tables; the output is inside of containers or an RRef."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(6, 3, sparse=True) for _ in range(2))

    def forward(self, tokens: Tensor, which: int, kind: str) -> Any:
        found = self.bags[which](tokens)
        return rpc.RRef(found) if kind == "rref" else {"count": 3, "found": (tokens, [found])}


def opened(output: Any) -> Tensor:
    tensor: Tensor = output["found"][1][0] if isinstance(output, dict) else output.local_value()
    return tensor


@pytest.mark.parametrize("kind", ["containers", "rref"])
def test_unused_sparse_parameters_and_wrapped_outputs(kind: str) -> None:
    def check() -> None:
        ddp = DDP(seeded(TwoBags), find_unused_parameters=True)
        tokens = torch.tensor([[0, 1], [2, 4]])
        for step in range(3):
            which = [(rank + step) % 2 for rank in range(2)]
            mine = which[dist.get_rank()]
            found = in_context(ddp, lambda w=mine: opened(ddp(tokens, w, kind)).square().mean())
            expected = reference_gradients(
                ddp, lambda m, r, w=which: opened(m(tokens, w[r], kind)).square().mean()
            )
            assert_close(found, expected)

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
