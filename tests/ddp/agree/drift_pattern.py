"""What the patterns of ``test_drift_silence.py`` share: their registry, a loss, a step.

A pattern trains a few steps in a way that is right in torch's DDP.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from paceline import DistributedDataParallel as DDP
from tests.ddp.compare import assert_same_on_all_ranks, batch
from tests.ddp.models import mlp

STEPS = 5
PATTERNS: dict[str, Callable[[str], None]] = {}
"""By name: functions of the transport."""


def own_setting(train: Callable[[str], None]) -> Callable[[str], None]:
    """Register a pattern that makes its own wrappers."""
    PATTERNS[train.__name__] = train
    return train


def pattern(train: Callable[[DDP, SGD], None]) -> Callable[[DDP, SGD], None]:
    """Register a pattern of one wrapper and one optimizer; models are compared at its end."""

    def with_wrapper(transport: str) -> None:
        ddp = DDP(mlp(4), transport=transport)
        train(ddp, SGD(ddp.parameters(), lr=0.1))
        assert_equal_models(ddp)

    PATTERNS[train.__name__] = with_wrapper
    return train


def loss(model: nn.Module, step: int, rows: int = 4) -> Tensor:
    return model(batch(step, rows=rows)).square().mean()


def train(ddp: DDP, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    loss(ddp, step).backward()
    optimizer.step()


def is_first() -> bool:
    return dist.get_rank() == 0


def assert_equal_models(ddp: nn.Module) -> None:
    assert_same_on_all_ranks({name: p.detach() for name, p in ddp.named_parameters()})
