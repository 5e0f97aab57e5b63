"""In the shape of torch's tutorial on torchrun: its environment, a trainer, a snapshot."""

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model, loader, optimizer, save_every, path):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.rank = int(os.environ["RANK"])
        self.model = model
        self.loader = loader
        self.optimizer = optimizer
        self.save_every = save_every
        self.path = path
        self.epochs_run = 0
        if os.path.exists(path):
            print("resuming from the snapshot")
            self.load()
        self.model = DDP(self.model)

    def load(self):
        snapshot = torch.load(self.path, map_location="cpu")
        self.model.load_state_dict(snapshot["model"])
        self.epochs_run = snapshot["epochs_run"]

    def save(self, epoch):
        torch.save({"model": self.model.module.state_dict(), "epochs_run": epoch + 1}, self.path)

    def run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(source), targets)
        loss.backward()
        self.optimizer.step()

    def train(self, epochs):
        for epoch in range(self.epochs_run, epochs):
            self.loader.sampler.set_epoch(epoch)
            for source, targets in self.loader:
                self.run_batch(source, targets)
            if self.rank == 0 and epoch % self.save_every == 0:
                self.save(epoch)
            print(f"rank {self.rank}, epoch {epoch}, {len(self.loader)} batches")


def train(epochs, save_every, batch_size):
    torch.manual_seed(0)
    data = TensorDataset(torch.rand(64, 20), torch.randint(4, (64,)))
    model = torch.nn.Linear(20, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=batch_size, shuffle=False, sampler=sampler)
    trainer = Trainer(model, loader, optimizer, save_every, "snapshot.pt")
    trainer.train(epochs)
    total = sum(value.double().sum().item() for value in trainer.model.parameters())
    print(f"result {total.hex()} {type(trainer.model).__module__}")


def main(epochs, save_every, batch_size):
    dist.init_process_group(backend="gloo")
    train(epochs, save_every, batch_size)  # its model is gone when the group goes: else torch hangs
    dist.destroy_process_group()
    time.sleep(1)  # torch aborts if Python ends before gloo has let go of its tensors


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("epochs", type=int)
    parser.add_argument("save_every", type=int)
    parser.add_argument("--batch_size", default=8, type=int)
    args = parser.parse_args()
    main(args.epochs, args.save_every, args.batch_size)
