"""A training script as people have them: it knows torch only. Prints its class and its losses."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1)]
    if "sync" in sys.argv:
        layers = [torch.nn.SyncBatchNorm.convert_sync_batchnorm(layer) for layer in layers]
    model = DDP(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(5):
        x = torch.randn(4, 8, generator=data)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    total = torch.stack(losses)
    dist.all_reduce(total)
    if rank == 0:
        print(type(model).__module__, [value.hex() for value in total.tolist()])
    # First: torch's reducer, if it holds the last reference to the group, waits for gloo's threads
    # with the interpreter lock in its hand, and one of them may wait for that lock.
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
