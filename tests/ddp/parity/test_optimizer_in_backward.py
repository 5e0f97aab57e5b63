"""Buckets start while backward goes on, in the same order on all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline import DistributedDataParallel as DDP
from paceline.testing import run_ranks
from tests.ddp.compare import batch
from tests.ddp.models import mlp


class Witness(torch.autograd.Function):
    """Calls a function when backward comes by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Any) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return gradient, None


class Watched(nn.Module):
    """Two layers; when backward is between them, ``call`` is called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.call: Any = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Witness.apply(self.first(x), self.call))


def counted_hook(state: list[int], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    state.append(bucket.index())
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def test_a_full_bucket_starts_before_backward_ends() -> None:
    def on_rank() -> tuple[list[int], list[int]]:
        started: list[int] = []
        seen: list[int] = []
        model = Watched()
        ddp = DDP(model, bucket_cap_mb=1e-5)
        ddp.register_comm_hook(started, counted_hook)
        for step in range(2):
            started.clear()
            # The hook of the second layer must have run when backward is at the first.
            model.call = lambda: seen.append(len(started))
            ddp(batch(step)).mean().backward()
        return seen, started

    for seen, started in run_ranks(2, on_rank):
        # In the first step nobody knows the order yet: one bucket, at the end.
        assert seen == [0, 2]
        assert started == [0, 1, 2, 3]


def test_stats_show_the_overlap() -> None:
    def on_rank() -> Any:
        ddp = DDP(mlp(4, depth=4), bucket_cap_mb=1e-5)
        for step in range(2):
            ddp(batch(step)).mean().backward()
        return ddp.stats()

    for stats in run_ranks(2, on_rank):
        assert len(stats.buckets) == 8
        began = [bucket.began_ms for bucket in stats.buckets]
        assert began == sorted(began), "buckets start in their order"
        assert began[0] < stats.backward_ms, "the first starts while backward goes on"
        for bucket in stats.buckets:
            assert 0 <= bucket.ready_ms <= bucket.began_ms <= bucket.ended_ms


def test_a_bucket_waits_for_its_turn() -> None:
    """A rank whose gradients arrive in another order starts buckets in the common order."""

    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))

        def forward(self, x: Tensor, order: list[int]) -> Tensor:
            for index in order:
                x = self.layers[index](x)
            return x

    def on_rank() -> list[int]:
        started: list[int] = []
        ddp = DDP(Choice(), bucket_cap_mb=1e-6)
        ddp.register_comm_hook(started, counted_hook)
        order = [0, 1, 2] if dist.get_rank() == 0 else [2, 0, 1]
        for step in range(3):
            ddp(batch(step), order).mean().backward()
        return started

    for started in run_ranks(2, on_rank):
        assert started[-6:] == [0, 1, 2, 0, 1, 2]
