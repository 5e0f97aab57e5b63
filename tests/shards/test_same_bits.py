"""Parameters, buffers and optimizer states have the same bits at any number of ranks."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.nn import functional as F

import paceline
from paceline import DistributedDataParallel as DDP
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


def test_whatever_buckets_and_views_there_are() -> None:
    """Many small buckets; one, whose gradients are copied; one, whose gradients are views."""
    names = ("mlp", "copies", "torch's views")
    places = [(1, "c10d"), (3, "shm")]
    found = {
        digests(n, each, *CASES)[f"{name} over {each}"] for name in names for n, each in places
    }
    assert len(found) == 1


def test_whichever_worker_loads() -> None:
    """Augmentation draws from the micro-batch's stream, in the rank or in any worker of it."""
    expected = digests(1, "c10d", *CASES)["mlp over c10d"]
    for told in run_ranks(2, train_with_workers, "mlp", STEPS, timeout_s=240):
        assert told == [expected] * len(told)


def train_gradients(hook: str) -> list[torch.Tensor]:
    """The gradients of one round, computed by the wrapper."""
    import torch.distributed as dist

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


def whole_batch_model(norm: type[torch.nn.Module]) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 6), norm(6), torch.nn.Linear(6, 5))


def train_synced() -> tuple[list[torch.Tensor], ...]:
    """A round over SyncBatchNorm: outputs of this rank's shards, gradients, buffers."""
    ddp = DDP(whole_batch_model(paceline.nn.SyncBatchNorm), shards=SHARDS)
    x, y = inputs()
    rows = slice(ddp.shard_shares.owned.start * MICRO, ddp.shard_shares.owned.stop * MICRO)

    def run(micro: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        output: torch.Tensor = ddp(micro[0])
        F.mse_loss(output, micro[1]).backward()
        return output.detach()

    outputs = ddp.run_shards((x[rows], y[rows]), run)
    return outputs, [p.grad for p in ddp.parameters()], list(ddp.buffers())


def test_a_batch_norm_over_all_shards_is_one_of_the_whole_batch() -> None:
    """torch's BatchNorm on the concatenated batch, in one process without shards."""
    whole, (x, y) = whole_batch_model(torch.nn.BatchNorm1d), inputs()
    output = whole(x)
    F.mse_loss(output, y).backward()
    told = run_ranks(3, train_synced)
    found = torch.cat([each for outputs, _, _ in told for each in outputs])
    torch.testing.assert_close(found, output.detach())
    for _, gradients, buffers in told:
        torch.testing.assert_close(gradients, [p.grad for p in whole.parameters()])
        torch.testing.assert_close(buffers, list(whole.buffers()))


def train_weighted() -> list[torch.Tensor]:
    """A round in which shards have 0, 1 or 2 samples, each with its number as weight."""
    ddp = DDP(model(), shards=SHARDS)
    x, y = inputs()
    owned = ddp.shard_shares.owned
    rows = slice(owned.start * MICRO, owned.stop * MICRO)
    for shard, (a, b) in zip(owned, ddp.shards((x[rows], y[rows])), strict=True):
        count = shard % 3
        with ddp.weighted(count):
            F.mse_loss(ddp(a[: max(1, count)]), b[: max(1, count)]).backward()
    return [p.grad for p in ddp.parameters()]


def test_weighted_shards_are_the_mean_over_all_samples() -> None:
    whole, (x, y) = model(), inputs()
    rows = [shard * MICRO + sample for shard in range(SHARDS) for sample in range(shard % 3)]
    F.mse_loss(whole(x[rows]), y[rows]).backward()
    for found in run_ranks(3, train_weighted):
        torch.testing.assert_close(found, [p.grad for p in whole.parameters()])


def train_norm() -> list[torch.Tensor]:
    """Two rounds over BatchNorm: its buffers."""
    ddp = DDP(torch.nn.BatchNorm1d(16), shards=SHARDS)
    owned = ddp.shard_shares.owned
    for turn in (1.0, 3.0):
        rows = inputs()[0][owned.start * MICRO : owned.stop * MICRO]
        for micro in ddp.shards(rows * turn):
            ddp(micro).square().sum().backward()
    return list(ddp.buffers())


def test_buffers_are_the_mean_over_shards() -> None:
    mean, variance = torch.zeros(16), torch.ones(16)
    for turn in (1.0, 3.0):
        micros = (inputs()[0] * turn).view(SHARDS, MICRO, 16)
        mean = (0.9 * mean + 0.1 * micros.mean(1)).mean(0)
        variance = (0.9 * variance + 0.1 * micros.var(1)).mean(0)
    for found in run_ranks(3, train_norm):
        torch.testing.assert_close(found, [mean, variance, torch.tensor(2)])


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
