"""What the soak trains. ``argv[1]`` is a directory for what each member notes, ``argv[2]`` JSON.

Each member writes two lines for a step, with one system call each: before the backward which
samples it brings, and after the commit what it holds. The job ends after the step that stands in
the file ``last``; it is written long before that step, so that all see it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from paceline import DistributedDataParallel as DDP
from paceline import elastic
from paceline.nn import SyncBatchNorm

OUT = Path(sys.argv[1])
PLAN: dict[str, Any] = json.loads(sys.argv[2])
MEMBER = int(os.environ["PACELINE_ELASTIC_MEMBER"])
SAMPLES, BATCH = 480, 24
NOTES = os.open(OUT / f"notes-{MEMBER}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def note(kind: str, **facts: Any) -> None:
    os.write(NOTES, (json.dumps({"kind": kind, "member": MEMBER, **facts}) + "\n").encode())


def digest() -> str:
    """A hash of parameters, buffers and moments."""
    moments = [v for s in optimizer.state.values() for v in s.values()]
    found = hashlib.sha256()
    for tensor in [*model.parameters(), *model.buffers(), *moments, torch.get_rng_state()]:
        found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()[:16]


torch.set_num_threads(1)
note("begin", pid=os.getpid(), slot=int(os.environ["PACELINE_RECORD_AS"]))
dist.init_process_group(PLAN["backend"])
torch.manual_seed(0)
inner = torch.nn.Sequential(
    torch.nn.Linear(16, 32), SyncBatchNorm(32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 4)
)
model = DDP(inner, bucket_cap_mb=0.001)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
x = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(1))
data = TensorDataset(torch.arange(SAMPLES), x, x[:, :4] * 2)
sampler = elastic.DistributedSampler(SAMPLES, BATCH, seed=3)
loader = DataLoader(
    data, batch_sampler=sampler, generator=torch.Generator(), num_workers=PLAN["workers"]
)
state = elastic.State(model=model, optimizer=optimizer, sampler=sampler, step=0, epoch=0)


def is_over() -> bool:
    last = OUT / "last"
    return last.exists() and state.step >= int(last.read_text())


@elastic.run
def train(state: elastic.State) -> None:
    while not is_over():
        sampler.set_epoch(state.epoch)
        for indices, inputs, targets in loader:
            epoch, place = state.events[-1].epoch, [dist.get_rank(), dist.get_world_size()]
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            where = [state.epoch, sampler.position]
            note("bring", step=state.step + 1, epoch=epoch, place=place, where=where,
                 samples=indices.tolist())  # fmt: skip
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            state.step += 1
            if state.step % sampler.batches == 0:
                state.epoch += 1
            held = digest()
            try:
                state.commit()
            finally:  # a commit may end the epoch
                note("commit", step=state.step, epoch=epoch, digest=held)
            time.sleep(PLAN["pause_s"])
            if is_over():
                return


train(state)
note("done", step=state.step, digest=digest())
