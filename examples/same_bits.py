"""Train a small network with dropout and BatchNorm: the same bits at 1 to 8 ranks.

    python examples/same_bits.py                               one rank
    torchrun --nproc-per-node 3 examples/same_bits.py          three ranks

Both print the same line at the end. See docs/same-bits.md; `paceline verify` compares two runs that
`paceline run` has recorded, or two files of --save.
"""

from __future__ import annotations

import argparse
import hashlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from paceline import DistributedDataParallel, ShardLoader

SHARDS = 8
SAMPLES = 2048


def make_data() -> TensorDataset:
    """Return points in the square and a smooth function of them, the same on every rank."""
    points = torch.rand(SAMPLES, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    values = torch.sin(3 * points[:, :1]) * torch.cos(3 * points[:, 1:])
    return TensorDataset(points, values)


def train(epochs: int, save: str) -> None:
    """Fit the network; every rank runs its share of the eight shards."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(),
        nn.Dropout(0.02), nn.Linear(64, 1),
    )  # fmt: skip
    ddp = DistributedDataParallel(model, shards=SHARDS)
    loader = ShardLoader(make_data(), ddp, micro_batch=16)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-2)

    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for batch in loader:
            for points, values in ddp.shards(batch):
                loss = nn.functional.mse_loss(ddp(points), values)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if save and dist.get_rank() == 0:
        torch.save(state, save)
    if dist.get_rank() == 0:
        model.eval()
        points, values = make_data().tensors
        with torch.no_grad():
            loss = nn.functional.mse_loss(model(points), values)
        data = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
        print(f"SHA-256 of the model {hashlib.sha256(data).hexdigest()[:16]}, loss {loss:.5f}")


def main() -> None:
    """Join the group, train, leave."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--save", default="", help="write a checkpoint there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" not in os.environ:  # not started by torchrun: one rank, any free port
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo")
    try:
        train(args.epochs, args.save)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
