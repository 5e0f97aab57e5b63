"""What ``paceline bench elastic`` trains: the same small network for every contender.

Run by a launcher as ``script.py CONTENDER FILE_PREFIX``. After each committed step a rank appends a
line of JSON to a file of its own: when, which step, and in which epoch, restart or quorum. With
torchrun rank 0 writes a checkpoint in every step, so that nothing is lost there either.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

HIDDEN, BATCH, PAUSE_S = 256, 64, 0.01
"""A small network, and a pause in each step that stands for the work of a larger one."""


class Notes:
    """The file of this process."""

    def __init__(self, prefix: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(f"{prefix}-{os.getpid()}", flags, 0o600)

    def step(self, step: int, epoch: int, rank: int) -> None:
        """A step is committed."""
        facts = {"at_s": time.monotonic(), "step": step, "epoch": epoch, "rank": rank}
        os.write(self._file, (json.dumps(facts) + "\n").encode())


def make_model() -> torch.nn.Module:
    """The network."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(3)]
    return torch.nn.Sequential(*layers)


def backward(model: torch.nn.Module, size: int) -> None:
    """Forward and backward on made-up samples."""
    model(torch.randn(size, HIDDEN)).square().mean().backward()
    time.sleep(PAUSE_S)


def with_paceline(notes: Notes) -> None:
    """Under ``paceline run --elastic``."""
    from paceline import DistributedDataParallel, elastic

    dist.init_process_group("gloo")
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.Adam(model.parameters())
    sampler = elastic.DistributedSampler(50_000, BATCH)
    state = elastic.State(model=model, optimizer=optimizer, sampler=sampler, step=0)

    @elastic.run
    def train(state: elastic.State) -> None:
        while True:
            sampler.set_epoch(state.step // sampler.batches)
            for indices in sampler:
                backward(model, len(indices))
                optimizer.step()
                optimizer.zero_grad()
                state.step += 1
                state.commit()
                notes.step(state.step, state.events[-1].epoch, dist.get_rank())

    train(state)


def with_torchrun(notes: Notes, checkpoint: Path) -> None:
    """Torch's DDP: all ranks are started again after a death, and load the checkpoint."""
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # A prefix for each restart: without it gloo often finds the addresses of the dead.
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    prefixed = PrefixStore(f"restart {restart}", store)
    dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=world)
    model = torch.nn.parallel.DistributedDataParallel(make_model())
    optimizer = torch.optim.Adam(model.parameters())
    step = 0
    if checkpoint.exists():
        found = torch.load(checkpoint)
        step = found["step"]
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
    while True:
        backward(model, BATCH // world)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if rank == 0:
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({"step": step, **states}, f"{checkpoint}.draft")
            os.replace(f"{checkpoint}.draft", checkpoint)
        notes.step(step, restart, rank)


def with_torchft(notes: Notes) -> None:
    """One replica group for each rank; whoever started it starts it again after its death."""
    import torchft  # type: ignore[import-not-found]

    model, replica = make_model(), int(os.environ["REPLICA_GROUP_ID"])
    optimizer = torch.optim.Adam(model.parameters())

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load_state_dict(found: dict[str, Any]) -> None:
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=1,
        timeout=timedelta(seconds=10),
        replica_id=f"replica_{replica}",
    )
    wrapped = torchft.DistributedDataParallel(manager, model)
    stepper = torchft.Optimizer(manager, optimizer)
    share = BATCH // int(os.environ["REPLICAS"])
    while True:
        stepper.zero_grad()
        backward(wrapped, share)
        before = manager.current_step()
        stepper.step()
        if manager.current_step() > before:
            notes.step(manager.current_step(), manager._quorum_id, replica)


def main() -> None:
    """Train as the contender that is named."""
    contender, prefix = sys.argv[1:3]
    torch.set_num_threads(1)
    notes = Notes(prefix)
    if contender == "torchrun":
        with_torchrun(notes, Path(f"{prefix}.checkpoint"))
    elif contender == "torchft":
        with_torchft(notes)
    else:
        with_paceline(notes)


if __name__ == "__main__":
    main()
