"""A communication hook of your own in ten lines: gradients clipped before they are averaged.

    python examples/own_hook.py                               one rank
    torchrun --nproc-per-node 2 examples/own_hook.py          two ranks

The same hook runs on torch's DDP. ``docs/hooks.md`` explains it.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn

from paceline import DistributedDataParallel


# docs: begin
def clipping_hook(largest, bucket):  # type: ignore[no-untyped-def]
    """Average gradients after cutting off values beyond ``largest``, the hook's state."""
    gradients = bucket.buffer()  # all of the bucket, flat, this rank's own
    gradients.clamp_(-largest, largest).div_(dist.get_world_size())
    work = dist.all_reduce(gradients, async_op=True)  # started, not waited for
    return work.get_future().then(lambda done: done.value()[0])  # the bucket's result


# docs: end


def train(steps: int) -> float:
    """Fit a line to noisy points, some of which are far off; return the error of its slope."""
    torch.manual_seed(dist.get_rank())
    ddp = DistributedDataParallel(nn.Linear(1, 1))
    ddp.register_comm_hook(0.5, clipping_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for _ in range(steps):
        x = torch.randn(64, 1)
        y = 3 * x + 1 + torch.where(torch.rand(64, 1) < 0.02, 500.0, 0.0) * torch.randn(64, 1)
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(x), y).backward()
        optimizer.step()
    return float(abs(ddp.module.weight.item() - 3))


def main() -> None:
    """Join the group, train, leave."""
    if "RANK" not in os.environ:  # not started by torchrun: one rank, any free port
        os.environ |= {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
        }
    dist.init_process_group("gloo")
    try:
        error = train(steps=400)
        if dist.get_rank() == 0:
            print(f"error of the slope {error:.5f}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
