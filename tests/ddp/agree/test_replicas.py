"""``check_every``: parameters that differ are named, with the rank, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline import DistributedDataParallel as DDP
from paceline.ddp.agree.checksum import checksums, combine
from paceline.ddp.features.buffers import BufferSync
from paceline.errors import ArgumentTypeError, ConfigurationError, ReplicasDifferError
from paceline.testing import run_ranks
from tests.ddp.compare import batch
from tests.ddp.models import mlp

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.bool,
    torch.float8_e4m3fn,
]

# --- the checksum --------------------------------------------------------------------------------


def checksum(tensor: torch.Tensor) -> int:
    """Of one among others, small and large."""
    others = [torch.ones(3), torch.ones(100_000), torch.ones(60_000)]
    found = checksums([*others, tensor, *others])
    alone = checksums([*others[:2], torch.zeros(60_000), tensor])
    assert found[3] == alone[3] or tensor.numel() == 0
    return found[3]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "size", [3, 65536 + 5, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 65536, 200_001))]
)
def test_any_bit_that_differs_is_seen(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(size)
    tensor = torch.randint(0, 2, (size,)).to(dtype)
    expected = checksum(tensor)
    assert checksum(tensor.clone()) == expected
    for place in {0, size // 2, size - 1}:
        other = tensor.clone()
        data = other.view(torch.uint8)
        bit = 1 if dtype is torch.bool else 0x80
        data[place * dtype.itemsize + dtype.itemsize - 1] ^= bit
        assert checksum(other) != expected


def test_places_and_signs_matter() -> None:
    tensor = torch.arange(1.0, 11.0)
    assert checksum(tensor) != checksum(tensor.flip(0))
    assert checksum(tensor) != checksum(-tensor)
    two = tensor.clone()
    two[1], two[3] = -two[1], -two[3]
    assert checksum(tensor) != checksum(two)
    assert checksum(torch.zeros(70_000)) == checksum(torch.zeros(70_000))
    assert combine([1, 2]) != combine([2, 1])


def test_strides_threads_and_views_do_not_matter() -> None:
    tensor = torch.randn(3, 5, 7, 300)
    expected = checksum(tensor)
    assert checksum(tensor.to(memory_format=torch.channels_last)) == expected
    assert checksum(torch.cat([torch.zeros(1, *tensor.shape[1:]), tensor])[1:]) == expected
    odd = torch.zeros(1 + 4 * 10, dtype=torch.int8)[1:]
    assert checksum(odd) == checksum(odd.clone())
    assert checksum(torch.empty(0)) == 0
    assert checksum(torch.complex(tensor, tensor).conj()) == checksum(
        torch.complex(tensor, -tensor)
    )


# --- ranks ---------------------------------------------------------------------------------------

Spoil = Callable[[nn.Module], None]


class Found(NamedTuple):
    step: int
    parameters: tuple[str, ...]


@torch.no_grad()
def change_last_bit(model: nn.Module) -> None:
    weight = model[2].weight.view(torch.int32)
    weight[0, 0] ^= 1


@torch.no_grad()
def change_frozen(model: nn.Module) -> None:
    model[2].bias += 1


def train(ddp: DDP, steps: int, at: int = -1, spoil: Spoil | None = None) -> Any:
    """Return in which step the difference was found; the last rank makes it."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(steps):
        if step == at and spoil is not None and dist.get_rank() == dist.get_world_size() - 1:
            spoil(ddp.module)
        optimizer.zero_grad()
        try:
            ddp(batch(step)).square().mean().backward()
        except ReplicasDifferError as error:
            is_named = f"rank {error.rank}: {error.parameters[0]}" in str(error)
            is_last = error.rank == dist.get_world_size() - 1
            return Found(step, error.parameters) if is_named and is_last else error
        optimizer.step()
    return None


def frozen() -> nn.Module:
    model = mlp(4)
    model[2].bias.requires_grad_(False)
    return model


def on_rank(transport: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    options: dict[str, Any] = {"transport": transport, "check_every": 3}
    found["healthy"] = train(DDP(mlp(4), **options), 10)
    found["bit"] = train(DDP(mlp(4), **options), 10, 4, change_last_bit)
    found["at once"] = train(DDP(mlp(4), **options), 10, 3, change_last_bit)
    found["frozen"] = train(DDP(frozen(), **options), 10, 1, change_frozen)
    found["unused"] = train(
        DDP(mlp(4), find_unused_parameters=True, **options), 10, 4, change_last_bit
    )
    ddp = DDP(mlp(4), **options)
    ddp.register_comm_hook(None, lambda _, bucket: _all_reduce(bucket))
    found["hook"] = train(ddp, 10, 4, change_last_bit)
    found["every step"] = train(
        DDP(mlp(4), transport=transport, check_every=1), 10, 5, change_last_bit
    )
    again = DDP(ddp.module, **options)  # the remedy that the error names
    found["again"] = train(again, 10)
    return found


def _all_reduce(bucket: Any) -> torch.futures.Future[torch.Tensor]:
    world = dist.get_world_size()
    work = dist.all_reduce(bucket.buffer().div_(world), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_a_difference_is_found_at_the_next_check(transport: str, ranks: int) -> None:
    first = ("2.weight",)
    for found in run_ranks(ranks, on_rank, transport):
        assert found["healthy"] is None
        assert found["again"] is None
        assert found["bit"].step == 6
        assert found["at once"] == (3, first)
        assert found["frozen"].step == 3
        assert found["frozen"].parameters[0] == "2.bias"
        assert found["unused"].step == 6
        assert found["hook"].step == 6
        assert found["every step"] == (5, first)


def with_broken_broadcast() -> Any:
    """On the last rank a bit of what arrives is wrong, from the fourth forward on."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    ddp = DDP(model, check_every=3)
    original, forwards = BufferSync.broadcast, iter(range(100))

    def broadcast(self: BufferSync, tensors: list[torch.Tensor], *more: Any) -> None:
        original(self, tensors, *more)
        if next(forwards) >= 3 and dist.get_rank() == dist.get_world_size() - 1:
            model[0].running_var.view(torch.int32)[0] ^= 1

    BufferSync.broadcast = broadcast  # type: ignore[assignment,method-assign]
    try:
        return train(ddp, 10)
    finally:
        BufferSync.broadcast = original  # type: ignore[method-assign]


def test_a_buffer_that_differs_after_its_broadcast_is_named() -> None:
    """Only a broadcast that went wrong makes one differ there."""
    for found in run_ranks(2, with_broken_broadcast):
        assert found == (3, ("0.running_var",)), "at once: step 3 is checked"


class Norms(nn.Module):
    """Has buffers that every forward changes, and an ignored parameter that differs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(4)
        self.norm = nn.BatchNorm1d(4)
        self.own = nn.Parameter(torch.full((3,), float(dist.get_rank())))
        self.register_buffer("mask", torch.full((4,), float(dist.get_rank())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.norm(x)).sum() + 0 * self.own.sum()


def no_alarm() -> list[float]:
    means = []
    for options in (
        {},
        {"forward_sync_buffers": False},
        {"mixed_precision": None, "find_unused_parameters": True},
    ):
        model = Norms()
        DDP._set_params_and_buffers_to_ignore_for_model(model, ["own", "mask"])
        ddp = DDP(model, check_every=1, **options)
        optimizer = torch.optim.Adam(ddp.module.body.parameters(), lr=0.01)
        for step in range(4):
            if step % 2:
                with ddp.no_sync():
                    ddp(batch(7 * step)).backward()
            if dist.get_rank() == 0 and not ddp.forward_sync_buffers:
                ddp(batch(3))  # a forward that nothing follows, on one rank
            ddp(batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        means.append(float(ddp.module.norm.running_mean.sum()))
    return means


def test_what_ranks_may_have_of_their_own_is_not_compared() -> None:
    one, other = run_ranks(2, no_alarm)
    assert one != other, "buffers did differ at the end of a step"


def joined() -> None:
    ddp = DDP(mlp(4), check_every=1)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    with ddp.join():
        for step in range(3 + dist.get_rank()):
            optimizer.zero_grad()
            ddp(batch(step)).square().mean().backward()
            optimizer.step()


def test_ranks_that_have_joined_are_not_compared() -> None:
    run_ranks(3, joined)


def refused() -> list[type[BaseException]]:
    found = []
    for value in (0, -1, 1.5, "100", True):
        with pytest.raises(ConfigurationError, match="check_every=") as caught:
            DDP(mlp(4), check_every=value)
        found.append(type(caught.value))
    return found


def test_wrong_intervals_are_refused() -> None:
    (found,) = run_ranks(1, refused)
    assert found == [ConfigurationError] * 2 + [ArgumentTypeError] * 3
