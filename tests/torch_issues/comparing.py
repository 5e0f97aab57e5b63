"""What the cases share: data and a model from a seed, and the gradients of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

Wrap = Callable[..., Any]


def batch(index: int, rows: int = 4, columns: int = 3) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(index + 1))


def mine(rows: int = 4) -> torch.Tensor:
    return batch(dist.get_rank(), rows)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def mean_over_ranks(losses: Callable[[nn.Module, int], torch.Tensor], make: Any) -> Any:
    """The gradients of one process: of the mean of all ranks' losses."""
    model = seeded(make)
    world = dist.get_world_size()
    sum(losses(model, rank) for rank in range(world)).div(world).backward()  # type: ignore[union-attr]
    return gradients(model)


def is_close(found: Any, wanted: Any) -> bool:
    return all(
        (left is None) == (right is None)
        and (left is None or torch.allclose(left, right, atol=1e-6))
        for left, right in zip(found, wanted, strict=True)
    )


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def ranks_are_equal(model: nn.Module) -> bool:
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    all_of_them = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, flat)
    return all(torch.equal(flat, other) for other in all_of_them)
