"""The reducer reduces through the interface alone: any transport will do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline import DistributedDataParallel as DDP
from paceline.errors import CollectiveInputError
from paceline.testing import run_ranks
from paceline.transport import C10dTransport, choose
from paceline.types import Reduction


class Recording(C10dTransport):
    """Counts calls, and keeps what it has handed out."""

    made: Recording

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self.allocated: list[torch.Tensor] = []
        self.calls: list[tuple[str, int]] = []
        Recording.made = self

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        flat = super().allocate(numel, dtype, device)
        self.allocated.append(flat)
        self.calls.append(("allocate", numel))
        return flat

    def start(self, flat: torch.Tensor) -> Reduction:
        self.calls.append(("start", flat.numel()))
        return super().start(flat)


class AllGather(C10dTransport):
    """Sums by gathering, in rank order, and blocks: as different as can be."""

    def start(self, flat: torch.Tensor) -> Reduction:
        parts = [torch.empty_like(flat) for _ in range(self.world)]
        dist.all_gather(parts, flat)
        flat.copy_(torch.stack(parts).sum(0))
        return Done()


class Done:
    """A reduction that was over before it was handed out."""

    def wait(self) -> None:
        """It is there."""

    def is_done(self) -> bool:
        return True

    def on_done(self, callback: Any) -> None:
        callback(0)


def train(transport: type[C10dTransport] | None, steps: int = 4) -> tuple[DDP, list[torch.Tensor]]:
    torch.manual_seed(0)
    if transport is not None:
        choose.choose_transport = lambda group, *_: transport(group)
    model = nn.Sequential(nn.Linear(8, 300), nn.ReLU(), nn.Linear(300, 300), nn.Linear(300, 2))
    ddp = DDP(model, bucket_cap_mb=0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(steps):
        ddp.zero_grad()
        ddp(torch.randn(4, 8)).square().sum().backward()
    return ddp, [parameter.grad.clone() for parameter in ddp.parameters()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_another_transport_gives_the_same_bits(ranks: int) -> None:
    def run() -> bool:
        plain = train(None)[1]
        gathered = train(AllGather)[1]
        return all(torch.equal(a, b) for a, b in zip(plain, gathered, strict=True))

    assert all(run_ranks(ranks, run))


def test_gradients_live_in_the_memory_of_the_transport() -> None:
    def run() -> tuple[bool, list[tuple[str, int]], int]:
        ddp, _ = train(Recording)
        storages = {flat.untyped_storage().data_ptr() for flat in Recording.made.allocated}
        inside = all(p.grad.untyped_storage().data_ptr() in storages for p in ddp.parameters())
        return inside, Recording.made.calls, len(ddp.stats().buckets)

    results = run_ranks(2, run)
    assert results[0] == results[1]
    inside, calls, buckets = results[0]
    assert inside
    # The plan of construction is one bucket; the one in order of arrival lasts for all other steps.
    assert [kind for kind, _ in calls] == (
        ["allocate", "start"] + ["allocate"] * buckets + ["start"] * 3 * buckets
    )
    assert buckets > 1


def test_what_shared_memory_cannot_sum_is_named() -> None:
    def on_rank() -> None:
        ddp = DDP(nn.Linear(2, 2), transport="shm")
        flat = torch.ones(4).to(torch.float8_e4m3fn)
        for start in (ddp._transport.start, ddp._transport.resolve()._group.all_reduce):
            arguments = (flat,) if start == ddp._transport.start else (flat, 0)
            with pytest.raises(CollectiveInputError, match="float8_e4m3fn cannot be summed"):
                start(*arguments)
        ddp(torch.ones(1, 2)).sum().backward()

    run_ranks(2, on_rank)
