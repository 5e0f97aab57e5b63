"""Top-k with momentum, the correction of deep gradient compression: what it computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline import DistributedDataParallel as DDP
from paceline import hooks
from paceline.testing import run_ranks
from tests.hooks.cases import Bucket

MOMENTUM = 0.9


def train(model: nn.Module, momentum: float) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    for step in range(8):
        seed = 10 * step + dist.get_rank()
        x = torch.randn(4, 12, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12))


@pytest.mark.parametrize("options", [{}, {"momentum_masking": True}], ids=["", "masked"])
def test_where_everything_is_sent_it_is_sgd_with_momentum(options: dict[str, Any]) -> None:
    def on_rank() -> None:
        model = DDP(net())
        hooks.register(model, "topk", ratio=1.0, momentum=MOMENTUM, **options)
        torch.testing.assert_close(train(model, 0.0), train(DDP(net()), MOMENTUM))

    run_ranks(2, on_rank)


@pytest.mark.parametrize("masked", [False, True])
def test_by_hand(masked: bool) -> None:
    """The algorithm of the paper in a few lines, in one process, for all ranks."""

    def on_rank() -> None:
        numel, k, world = 60, 6, dist.get_world_size()
        state = hooks.TopKState(ratio=0.1, momentum=MOMENTUM, momentum_masking=masked)
        parameters = [torch.zeros(numel)]
        velocity, residual = torch.zeros(world, numel), torch.zeros(world, numel)
        for step in range(12):
            generator = torch.Generator().manual_seed(step)
            gradients = torch.randn(world, numel, generator=generator)
            velocity = MOMENTUM * velocity + gradients
            residual += velocity
            sent = torch.zeros(world, numel, dtype=torch.bool)
            sent.scatter_(1, residual.abs().topk(k, dim=1).indices, True)
            expected = (residual * sent).mean(dim=0)
            residual[sent] = 0.0
            if masked:
                velocity[sent] = 0.0
            buffer = gradients[dist.get_rank()].clone()
            found = hooks.topk_hook(state, Bucket(buffer, parameters)).wait()
            torch.testing.assert_close(found, expected)

    run_ranks(2, on_rank)


def test_the_ratio_shrinks_by_the_same_factor_in_every_step() -> None:
    state = hooks.TopKState(ratio=0.01, warmup_steps=4, warmup_ratio=0.32)
    ratios = [state.ratio_at(step) for step in range(7)]
    assert ratios == pytest.approx([0.16, 0.08, 0.04, 0.02, 0.01, 0.01, 0.01])
