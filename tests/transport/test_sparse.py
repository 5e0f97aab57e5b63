"""Sums of sparse gradients: the numbers, and that torch's gloo group is never asked for one."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline import DistributedDataParallel as DDP
from paceline.hooks import allreduce_hook
from paceline.testing import run_ranks
from paceline.transport import C10dTransport

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
SHAPE = (7, 5, 3)


def gradient_of(rank: int, dtype: torch.dtype, sparse_dim: int, rows: int) -> torch.Tensor:
    """Small whole numbers, so that sums are exact in every dtype."""
    draw = torch.Generator().manual_seed(rank)
    indices = torch.stack(
        [torch.randint(0, n, (rows,), generator=draw) for n in SHAPE[:sparse_dim]]
    )
    values = torch.randint(-4, 5, (rows, *SHAPE[sparse_dim:]), generator=draw).to(dtype)
    return torch.sparse_coo_tensor(indices, values, SHAPE, check_invariants=True)


def sums(rows_of: list[int]) -> list[str]:
    """Sum every kind; return what was wrong."""
    rank, world = dist.get_rank(), dist.get_world_size()
    transport = C10dTransport(dist.group.WORLD)
    wrong = []
    for dtype in DTYPES:
        for sparse_dim in (1, 2, 3):
            every = [gradient_of(r, dtype, sparse_dim, rows_of[r]) for r in range(world)]
            expected = sum(g.to_dense() for g in every)
            mine = every[rank].coalesce()
            transport.start_sparse(mine).wait()
            if not (mine.is_coalesced() and torch.equal(mine.to_dense(), expected)):
                wrong.append(f"{dtype}, {sparse_dim} sparse dimensions")
    return wrong


@pytest.mark.parametrize("rows_of", [[4, 4, 4], [0, 9, 1], [0, 0, 0]])
def test_sums_have_the_numbers_of_dense_ones(rows_of: list[int]) -> None:
    assert run_ranks(3, partial(sums, rows_of)) == [[], [], []]


def train(transport: str, with_hook: bool) -> list[str]:
    """Train with a sparse gradient; return what kinds of all-reduce the group was asked for."""
    group = dist.group.WORLD
    asked: list[str] = []
    original = type(group).allreduce

    def allreduce(self: object, tensors: list[torch.Tensor], *args: object) -> object:
        asked.extend("sparse" if tensor.is_sparse else "dense" for tensor in tensors)
        return original(self, tensors, *args)

    type(group).allreduce = allreduce
    try:
        ddp = DDP(nn.Embedding(6, 3, sparse=True), transport=transport)
        if with_hook:
            ddp.register_comm_hook(None, allreduce_hook)
        ddp(torch.tensor([dist.get_rank(), 5])).sum().backward()
    finally:
        type(group).allreduce = original
    assert ddp.module.weight.grad is not None
    found = ddp.module.weight.grad.to_dense()[:, 0].tolist()
    assert found == [0.5, 0.5, 0.0, 0.0, 0.0, 1.0]
    return asked


@pytest.mark.parametrize("with_hook", [False, True])
@pytest.mark.parametrize("transport", ["c10d", "shm"])
def test_gloo_is_not_asked_for_a_sparse_sum(transport: str, with_hook: bool) -> None:
    """[Note: sparse all-reduce on gloo] in paceline/transport/sparse.py: it breaks the heap."""
    for asked in run_ranks(2, partial(train, transport, with_hook)):
        assert "sparse" not in asked
        assert transport == "shm" or asked, "the spy saw nothing at all"
