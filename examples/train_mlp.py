"""Train a small network on a function of two variables: a complete script for 1 or more ranks.

    python examples/train_mlp.py                               one rank
    torchrun --nproc-per-node 2 examples/train_mlp.py          two ranks

To come from torch, one line changes (marked below); everything else is an ordinary DDP script.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

# before: from torch.nn.parallel import DistributedDataParallel
from paceline import DistributedDataParallel

SAMPLES = 2048


def make_data() -> TensorDataset:
    """Return points in the square and a smooth function of them, the same on every rank."""
    points = torch.rand(SAMPLES, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    values = torch.sin(3 * points[:, :1]) * torch.cos(3 * points[:, 1:])
    return TensorDataset(points, values)


def train(epochs: int) -> None:
    """Fit the network; every rank sees its share of the data."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )
    ddp = DistributedDataParallel(model)
    data = make_data()
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=128 // dist.get_world_size(), sampler=sampler)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-2)

    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for points, values in loader:
            loss = nn.functional.mse_loss(ddp(points), values)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach() / len(loader)
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1:2d}  loss {total.item() / dist.get_world_size():.5f}")


def main() -> None:
    """Join the group, train, leave."""
    parser = argparse.ArgumentParser(description="Train a small network, on 1 or more ranks.")
    parser.add_argument("--epochs", type=int, default=15)
    args = parser.parse_args()
    if "RANK" not in os.environ:  # not started by torchrun: one rank, any free port
        os.environ |= {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
        }
    dist.init_process_group("gloo")
    try:
        train(args.epochs)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
