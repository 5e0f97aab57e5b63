"""Parameters, buffers and optimizer states have the same bits at any number of ranks."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.nn import functional as F

import paceline
from paceline.testing import run_ranks
from tests.shards.trainings import CASES, MICRO, SHARDS, train_all, train_with_workers

STEPS = 6
# What c10d carries otherwise than shared memory; the others are slow over it.
OVER_C10D = ["mlp", "transformer", "synced", "bf16"]


@functools.cache
def digests(world: int, transport: str, *names: str) -> dict[str, str]:
    """What trainings on so many ranks end with: the same on all of them."""
    told = run_ranks(world, train_all, list(names), STEPS, [transport], timeout_s=240)
    assert all(each == told[0] for each in told)
    return told[0]


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("name", CASES)
def test_as_on_one_rank(world: int, name: str) -> None:
    found = digests(world, "shm", *CASES)[f"{name} over shm"]
    assert found == digests(1, "c10d", *CASES)[f"{name} over c10d"]


@pytest.mark.parametrize("name", OVER_C10D)
def test_over_c10d(name: str) -> None:
    place = f"{name} over c10d"
    assert digests(3, "c10d", *OVER_C10D)[place] == digests(1, "c10d", *CASES)[place]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_all_over_c10d(world: int, name: str) -> None:
    place = f"{name} over c10d"
    assert digests(world, "c10d", *CASES)[place] == digests(1, "c10d", *CASES)[place]


def test_whichever_worker_loads() -> None:
    """Augmentation draws from the micro-batch's stream, in the rank or in any worker of it."""
    expected = digests(1, "c10d", *CASES)["mlp over c10d"]
    for told in run_ranks(2, train_with_workers, "mlp", STEPS, timeout_s=240):
        assert told == [expected] * len(told)


def train_gradients(hook: str) -> list[torch.Tensor]:
    """The gradients of one round, computed by the wrapper."""
    import torch.distributed as dist

    from paceline import DistributedDataParallel as DDP

    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = inputs()
    begin, end = rank * SHARDS // world * MICRO, (rank + 1) * SHARDS // world * MICRO
    ddp = DDP(model(), shards=SHARDS)
    if hook:
        ddp.register_comm_hook(None, getattr(paceline.hooks, hook))
    for a, b in ddp.shards((x[begin:end], y[begin:end])):
        F.mse_loss(ddp(a), b).backward()
    return [p.grad.clone() for p in ddp.parameters() if p.grad is not None]


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 20), torch.nn.Tanh(), torch.nn.Linear(20, 5))


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = SHARDS * MICRO
    return torch.randn(rows, 16, generator=generator), torch.randn(rows, 5, generator=generator)


@pytest.mark.parametrize(
    ("hook", "dtype"),
    [
        ("", torch.float32),
        ("bf16_compress_hook", torch.bfloat16),
        ("fp16_compress_hook", torch.float16),
    ],
)
def test_gradients_are_those_of_the_tree_written_by_hand(hook: str, dtype: torch.dtype) -> None:
    """Without a line of Paceline: an eighth of ((0+1)+(2+3))+((4+5)+(6+7)), in the dtype."""
    torch.set_num_threads(1)
    plain, (x, y) = model(), inputs()
    leaves = []
    for shard in range(SHARDS):
        rows = slice(shard * MICRO, (shard + 1) * MICRO)
        plain.zero_grad()
        F.mse_loss(plain(x[rows].clone()), y[rows].clone()).backward()
        found = [p.grad / SHARDS for p in plain.parameters() if p.grad is not None]
        leaves.append([gradient.to(dtype) for gradient in found])
    while len(leaves) > 1:
        leaves = [
            [a + b for a, b in zip(left, right, strict=True)]
            for left, right in zip(leaves[::2], leaves[1::2], strict=True)
        ]
    expected = [each.float() for each in leaves[0]]
    for found in run_ranks(3, train_gradients, hook):
        assert all(map(torch.equal, found, expected))
