"""What the tests of ``ddp.weighted(n)`` share: a model, batches, the mean of one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from paceline import DistributedDataParallel as DDP

Gradients = dict[str, torch.Tensor]


class Net(nn.Module):
    """Two matrices of any dtype, complex too, and one that a forward may leave out."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.first = nn.Parameter(torch.randn(4, 8, generator=generator).to(dtype))
        self.second = nn.Parameter(torch.randn(8, 3, generator=generator).to(dtype))
        self.spare = nn.Parameter(torch.randn(8, 3, generator=generator).to(dtype))

    def forward(self, x: torch.Tensor, spare: bool = True) -> torch.Tensor:
        hidden = (x @ self.first).tanh()
        out = hidden @ self.second
        return out + hidden @ self.spare if spare else out


def make_batch(
    rank: int, size: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(size, 4, generator=generator).to(dtype)
    return x, torch.randn(size, 3, generator=generator).to(dtype)


def mean_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean over samples; NaN for an empty batch, like every mean loss of torch."""
    return (output - target).abs().square().mean()


def gradients(module: nn.Module) -> Gradients:
    module = module.module if isinstance(module, DDP) else module
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def reference(sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Gradients:
    """One process that trains on all samples."""
    batches = [make_batch(rank, size, dtype) for rank, size in enumerate(sizes)]
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    net = Net(dtype)
    mean_loss(net(x), y).backward()
    return gradients(net)


def weighted_step(ddp: DDP, sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
    size = sizes[dist.get_rank()]
    x, y = make_batch(dist.get_rank(), size, dtype)
    with ddp.weighted(size):
        mean_loss(ddp(x), y).backward()


def plain_step(ddp: DDP, sizes: tuple[int, ...]) -> None:
    x, y = make_batch(dist.get_rank(), sizes[dist.get_rank()])
    mean_loss(ddp(x), y).backward()


def assert_all_close(
    per_rank: list[Gradients], expected: Gradients, **tolerance: float | None
) -> None:
    for found in per_rank:
        torch.testing.assert_close(found, expected, **tolerance)


UNEQUAL = (5, 2, 9)
