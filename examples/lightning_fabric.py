"""Train a small network with Lightning Fabric on two ranks; the strategy's name is all it takes.

Run it with `python examples/lightning_fabric.py`: Fabric starts the second rank itself. It also
runs under torchrun and Slurm.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 8


def circles(samples: int) -> TensorDataset:
    """Points in the plane, labelled by whether they lie inside of a circle."""
    points = torch.rand(samples, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return TensorDataset(points, (points.norm(dim=1) < 0.8).long())


def main() -> None:
    """Train, and print the loss of every epoch."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy="paceline")
    fabric.launch()
    fabric.seed_everything(0, verbose=False)

    net = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2))
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=3e-3))
    loader = fabric.setup_dataloaders(DataLoader(circles(2048), batch_size=32, shuffle=True))

    for epoch in range(EPOCHS):
        total = torch.zeros(())
        for points, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(points), labels)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            total += loss.detach()
        mean = fabric.all_reduce(total / len(loader), reduce_op="mean")
        fabric.print(f"epoch {epoch + 1}  loss {mean:.4f}")


if __name__ == "__main__":
    main()
