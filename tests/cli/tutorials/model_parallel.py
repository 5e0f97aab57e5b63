"""In the shape of torch's tutorial on DDP with model parallelism: two devices, both CPUs."""

import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class TwoDevices(nn.Module):
    def __init__(self, dev0, dev1):
        super().__init__()
        self.dev0 = dev0
        self.dev1 = dev1
        self.net1 = nn.Linear(10, 10).to(dev0)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5).to(dev1)

    def forward(self, x):
        x = self.relu(self.net1(x.to(self.dev0)))
        return self.net2(x.to(self.dev1))


def demo_model_parallel(rank):
    torch.manual_seed(0)
    dev0, dev1 = torch.device("cpu"), torch.device("cpu:0")
    model = DDP(TwoDevices(dev0, dev1))  # neither device_ids nor output_device
    loss_of = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    torch.manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        outputs = model(torch.randn(20, 10))
        labels = torch.randn(20, 5).to(dev1)
        loss_of(outputs, labels).backward()
        optimizer.step()
    total = sum(value.double().sum().item() for value in model.parameters())
    print(f"result {total.hex()} {type(model).__module__}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    demo_model_parallel(dist.get_rank())
    dist.destroy_process_group()
    time.sleep(1)  # torch aborts if Python ends before gloo has let go of its tensors
