"""Scripts of others, unchanged, under ``paceline run``: examples, torch's tutorial, Accelerate."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.launched import ROOT, launch
from tests.required import missing_framework, needs, skip
from tests.test_examples import EXPECTED, FRAMEWORK, check

pytestmark = pytest.mark.slow

EXAMPLES = [name for name in EXPECTED if name != "ray_train.py"]  # Ray starts its own ranks


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example(name: str, tmp_path: Path) -> None:
    if name in FRAMEWORK and (missing := missing_framework(FRAMEWORK[name])):
        skip("frameworks", missing)
    done = launch("-n", "2", "--tee", "0", str(ROOT / "examples" / name), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    check(name, done.stdout)
    (run,) = (tmp_path / "paceline-runs").iterdir()
    assert {path.name for path in run.glob("*.events")} == {"rank0.events", "rank1.events"}


TUTORIAL = """
import os
import sys
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

class Numbers(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.full((4,), index / 64), torch.tensor([float(index % 2)])

def setup():
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()

def cleanup():
    dist.destroy_process_group()

def train(method):
    rank, world = setup()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = Numbers()
    sampler = DistributedSampler(data, num_replicas=world, rank=rank)
    loader = DataLoader(
        data, batch_size=8, sampler=sampler, num_workers=2, multiprocessing_context=method
    )
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), labels).backward()
            optimizer.step()
    path = "checkpoint.pt"
    if rank == 0:
        torch.save(model.state_dict(), path)
    dist.barrier()
    state = torch.load(path, map_location="cpu")
    model.load_state_dict(state)
    total = sum(float(value.double().sum()) for value in state.values())
    print(f"rank {rank} of {world}: {total!r} {type(model).__module__}")
    cleanup()

if __name__ == "__main__":
    train(sys.argv[1])
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_torchs_tutorial(method: str, tmp_path: Path) -> None:
    """With torch's DDP and with ours in its place, and the same numbers from both."""
    (tmp_path / "tutorial.py").write_text(TUTORIAL)
    sums = []
    for options, module in (([], "torch."), (["--patch"], "paceline.")):
        done = launch("-n", "2", *options, "tutorial.py", method, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        first, second = sorted(line.removeprefix("[1] ") for line in done.stdout.splitlines())
        assert first.startswith("rank 0 of 2: ")
        assert second.startswith("rank 1 of 2: ")
        assert first.split()[-1].startswith(module)
        assert first.split()[4:] == second.split()[4:]
        sums.append(first.split()[4])
    assert sums[0] == sums[1]


ACCELERATE = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
data = TensorDataset(torch.arange(64.0).view(32, 2) / 64, torch.ones(32, 1))
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
steps = 0
for inputs, labels in loader:
    optimizer.zero_grad()
    accelerator.backward(torch.nn.functional.mse_loss(model(inputs), labels))
    optimizer.step()
    steps += 1
accelerator.wait_for_everyone()
weights = accelerator.gather(accelerator.unwrap_model(model).weight.detach().clone())
print(accelerator.num_processes, steps, torch.equal(weights[0], weights[1]))
accelerator.end_training()
"""


@needs("accelerate")
def test_accelerate(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ACCELERATE)
    done = launch("-n", "2", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["2 4 True", "[1] 2 4 True"]
