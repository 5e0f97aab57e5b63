"""A training script as people write it, with one thing wrong, FAULT, on one rank, CULPRIT or 1.

Knows nothing of Paceline but the wrapper. Run by test_faults.py on ranks that fork, and by hand:

    export FAULT=forward PACELINE_RUN_DIR=/tmp/run PACELINE_STALL_AFTER=2
    torchrun --nproc-per-node 3 train.py
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline import DistributedDataParallel as DDP

STEPS, AT = 12, 5
LONG_S = float(os.environ.get("LONG_S", "8"))
LOADER_WORKERS = int(os.environ.get("LOADER_WORKERS", "0"))
FAULT = os.environ["FAULT"]
CULPRIT = int(os.environ.get("CULPRIT", "1"))
step = 0


def is_here(fault: str, at: int | None = None) -> bool:
    """Whether this is the place, the rank and the step; notes when it happens.

    A worker of a data loader does not know the step: it says for which one its sample is.
    """
    is_now = (step if at is None else at) == AT
    here = fault == FAULT and is_now and dist.get_rank() == CULPRIT
    if here:
        with (
            contextlib.suppress(FileExistsError),  # it happens once for each sample of a batch
            Path(os.environ["PACELINE_RUN_DIR"], "fault").open("x") as file,
        ):
            file.write(str(time.time()))
    return here


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 2 * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        if is_here("loader", at=index // 2):
            time.sleep(LONG_S / 2)  # two samples a batch
        return torch.full((8,), float(index))


class SlowGradient(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        if is_here("backward"):
            time.sleep(LONG_S)
        return gradient


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.number == 3:
            fail_in_forward()
            x = SlowGradient.apply(x)
        return self.linear(x).relu()


def fail_in_forward() -> None:
    if is_here("forward"):
        time.sleep(LONG_S)
    if is_here("native sleep"):
        ctypes.PyDLL(None).sleep(int(LONG_S))  # keeps the GIL
    if is_here("exception"):
        raise ValueError("a bad batch")
    if is_here("os._exit"):
        os._exit(3)
    if is_here("SIGKILL"):
        os.kill(os.getpid(), signal.SIGKILL)
    if is_here("SIGSTOP"):
        resume = f"sleep {LONG_S}; kill -CONT {os.getpid()}"
        with contextlib.suppress(OSError):
            subprocess.Popen(["/bin/sh", "-c", resume], start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    if is_here("two locks"):
        deadlock()


class SlowSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        if is_here("optimizer"):
            time.sleep(LONG_S)
        return super().step(closure)


def deadlock() -> None:
    first, second = threading.Lock(), threading.Lock()
    has_second = threading.Event()
    ends = threading.Timer(LONG_S, os._exit, (7,))
    ends.daemon = True
    ends.start()

    def other() -> None:
        with second:
            has_second.set()
            with first:
                pass

    with first:
        threading.Thread(target=other, name="logger", daemon=True).start()
        has_second.wait()
        with second:
            pass


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*(Block(number) for number in range(5)))
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))


def main() -> None:
    global step
    torch.manual_seed(0)
    model = DDP(Net(), bucket_cap_mb=1e-4)
    optimizer = SlowSGD(model.parameters(), lr=1e-4)
    loader = iter(torch.utils.data.DataLoader(Samples(), 2, num_workers=LOADER_WORKERS))
    for number in range(STEPS):
        step = number
        batch = next(loader)
        if is_here("early exit"):
            sys.exit(0)
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if is_here("collective"):
            dist.barrier()
        time.sleep(0.1)


if __name__ == "__main__":
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    main()
