"""In the shape of torch's elastic_ddp.py: a toy model, and ``@record`` around main."""

import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def train(rank):
    print(f"start of rank {rank}, local rank {os.environ['LOCAL_RANK']}")
    torch.manual_seed(0)
    model = DDP(ToyModel())
    loss_of = nn.MSELoss()
    optimizer = optim.SGD(model.parameters(), lr=0.001)
    torch.manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        outputs = model(torch.randn(20, 10))
        loss_of(outputs, torch.randn(20, 5)).backward()
        optimizer.step()
    total = sum(value.double().sum().item() for value in model.parameters())
    print(f"result {total.hex()} {type(model).__module__}")


@record
def main():
    dist.init_process_group("gloo")
    train(dist.get_rank())  # its model is gone when the group goes: torch may hang or abort else
    dist.destroy_process_group()
    time.sleep(1)  # torch aborts if Python ends before gloo has let go of its tensors


if __name__ == "__main__":
    main()
