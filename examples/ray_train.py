"""Train a small network with Ray Train on two workers; only torch_config is Paceline's.

Run it with `python examples/ray_train.py`: it starts a Ray cluster of its own on this machine.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import ray
import ray.train
import torch
import torch.nn.functional as F
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.integrations.ray import TorchConfig


def train(config: dict[str, Any]) -> None:
    """Run on every worker: wrap, train, report."""
    torch.manual_seed(0)
    points = torch.rand(2048, 2) * 2 - 1
    data = TensorDataset(points, (points.norm(dim=1) < 0.8).long())
    net = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2))
    model = prepare_model(net)
    loader = prepare_data_loader(DataLoader(data, batch_size=32, shuffle=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    for epoch in range(config["epochs"]):
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
        is_last = epoch + 1 == config["epochs"]
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if is_last and ray.train.get_context().get_world_rank() == 0:
                torch.save(model.module.state_dict(), os.path.join(folder, "model.pt"))
                checkpoint = Checkpoint.from_directory(folder)
            ray.train.report({"loss": total / len(loader)}, checkpoint=checkpoint)


def main() -> None:
    """Start a cluster, train, and print the last loss."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            train,
            train_loop_config={"lr": 3e-3, "epochs": 8},
            torch_config=TorchConfig(),
            scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
            run_config=RunConfig(storage_path=folder, name="circles"),
        )
        print(f"loss {trainer.fit().metrics['loss']:.4f}")
    ray.shutdown()


if __name__ == "__main__":
    main()
