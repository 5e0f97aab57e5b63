"""What the tests of elastic jobs train: a small network, with faults at named points.

Run by ``paceline run --elastic``. ``argv[1]`` is a directory: each rank that ends well writes
``done-<member>`` there, with a hash of its whole state; every committed batch goes to
``seen-<member>``. ``argv[2]`` is JSON: how many steps, the backend, and the faults. A fault fires
once in the job, at a point of a step, in the rank that has that number then; it leaves a file. Some
wait until the test has done its part (``acted-<number>``).
With ``world`` it goes on until there are so many ranks. ``digests-<member>`` has a hash of the
whole state after every commit. With ``save`` it writes a checkpoint every so many steps.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from paceline import DistributedDataParallel as DDP
from paceline import elastic, hooks
from paceline.elastic import session
from paceline.elastic import state as state_module
from paceline.elastic.unblock import cut_connections
from paceline.nn import SyncBatchNorm

OUT = Path(sys.argv[1])
PLAN: dict[str, Any] = json.loads(sys.argv[2])
STEPS: int = PLAN["steps"]
MEMBER = os.environ.get("PACELINE_ELASTIC_MEMBER") or os.environ["RANK"]
SAMPLES = 240


def is_meant(who: int | str, rank: int | None) -> bool:
    """Whether this is the rank (-1: any), or on the host, that a fault is planned for."""
    if isinstance(who, str):
        return who == os.environ.get("PACELINE_HOST_ID")
    return who < 0 or who == (dist.get_rank() if rank is None else rank)


def fault(point: str, step: int, own: int | None = None) -> None:
    """Fire what is planned for this moment, once in the whole job."""
    for number, (kind, where, when, rank) in enumerate(PLAN.get("faults", ())):
        if point != where or step < when or (own is None and not dist.is_initialized()):
            continue
        if not is_meant(rank, own):
            continue
        if point.endswith("as joiner") and not (OUT / f"fired-{number - 1}").exists():
            continue  # of the fault before it
        if kind == "wait" and not (OUT / f"armed-{number}").exists():
            continue
        try:
            (OUT / f"fired-{number}").touch(exist_ok=False)
        except FileExistsError:
            continue
        fire(kind, number)


SIGNALS = {"kill": signal.SIGKILL, "coordinator and rank": signal.SIGKILL, "stop": signal.SIGSTOP}
SIGNALS["terminate"] = signal.SIGTERM
# Both wait in C; with the first no other thread of the process runs any more.
PAUSES = {"deadlock": ctypes.PyDLL, "native wait": ctypes.CDLL}


def fire(kind: str, number: int) -> None:
    if kind in ("coordinator", "coordinator and rank", "wait"):
        while not (OUT / f"acted-{number}").exists():  # by the test
            time.sleep(0.005)
    if kind in SIGNALS:
        os.kill(os.getpid(), SIGNALS[kind])
    elif kind == "quit":
        sys.exit(0)
    elif kind == "exit":
        os._exit(3)
    elif kind in ("hang", "slow"):
        time.sleep(10_000 if kind == "hang" else 0.4)
    elif kind in PAUSES:
        PAUSES[kind](None).pause()
    elif kind == "cut":
        own = os.getpid()
        peers = {int(path.name[4:]) for path in OUT.glob("pid-*")} - {own}
        (OUT / f"cut-{own}-{time.monotonic_ns()}").write_text(str(cut_connections(peers)))
    elif kind == "raise":
        raise ValueError("as planned")


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(16, 32)
        self.norm = SyncBatchNorm(32)
        self.drop = torch.nn.Dropout(0.1)
        self.last = torch.nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        fault("norm", state.step)
        hidden = self.drop(torch.relu(self.norm(hidden)))
        fault("forward", state.step)
        return self.last(hidden)


class Optimizer(torch.optim.AdamW):
    """Dies in the middle of a step, when some parameters have changed."""

    def step(self, closure: Any = None) -> Any:
        groups, self.param_groups = (
            self.param_groups,
            [{**group, "params": group["params"][:2]} for group in self.param_groups],
        )
        super().step(closure)
        fault("optimizer", state.step)
        self.param_groups = [{**g, "params": g["params"][2:]} for g in groups]
        super().step(closure)
        self.param_groups = groups


def note_worker(_: int) -> None:
    """A loader's worker has begun."""
    (OUT / f"worker-{MEMBER}-{os.getpid()}").touch()


def open_stream(epoch: int, start: int) -> Any:
    """Samples in an order of the epoch."""
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
    return (data[index] for index in order[start:])


def plant_faults(model: Model) -> None:
    """In places that a script does not see: a bucket, a commit, a recovery."""
    model.last.weight.register_hook(lambda grad: fault("bucket", state.step))
    keep, copy, rebuild = state._kept.keep, state_module.copy_from, session.Session._rebuild

    def keep_then(values: Any) -> None:
        fault("commit", state.step)
        keep(values)

    def copy_then(*args: Any, **options: Any) -> Any:
        fault("copy", state.step)
        if args[2]["commits"] == 0:
            fault("copy as joiner", 0)
        return copy(*args, **options)

    def rebuild_then(*args: Any) -> None:
        fault("recovery", state.step)
        rebuild(*args)

    find_all = session.Session._meet

    def find_all_then(*args: Any) -> None:
        find_all(*args)
        fault("connect", state.step, args[2])

    session.Session._meet = find_all_then  # type: ignore[method-assign]
    meet = hooks.DiLoCoOptimizer._meet

    def meet_after(*args: Any) -> None:
        fault("meeting", state.step)
        meet(*args)

    hooks.DiLoCoOptimizer._meet = meet_after  # type: ignore[method-assign]
    state._kept.keep = keep_then  # type: ignore[method-assign]
    state_module.copy_from = copy_then
    session.Session._rebuild = rebuild_then  # type: ignore[method-assign]


def hook_state() -> Any:
    """What ranks have in common of the hook's state."""
    registered = model.reducer.registered.hook if model.reducer is not None else None
    state = None if registered is None else registered.state
    if hasattr(state, "shared_state"):
        shared = state.shared_state()
        return shared["step"], shared["layouts"], str(shared["extra"].get("qs"))
    return state.state_dict() if hasattr(state, "state_dict") else None


def digests() -> dict[str, str]:
    """A hash of each part of the state."""
    moments = [v for s in optimizer.state.values() for v in s.values()]
    parts = {
        "parameters": [p.detach() for p in model.parameters()],
        "buffers": list(model.buffers()),
        "optimizer": moments,
        "generator": [torch.get_rng_state()],
    }
    found = {
        name: hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()
        for name, tensors in parts.items()
    }
    found["scheduler"] = repr(scheduler.state_dict())
    found["hook"] = repr(hook_state())
    found["counts"] = repr((state.step, state.commits, state.epoch))
    generators = repr((random.getstate(), numpy.random.get_state()[1].tolist()))
    found["python"] = hashlib.sha256(generators.encode()).hexdigest()
    return found


def average(_: None, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """A communication hook, in which survivors may be blocked."""
    fault("hook", state.step)
    dist.all_reduce(bucket.buffer())
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer().div_(dist.get_world_size()))
    return done


torch.set_num_threads(1)
session.MEET_S = PLAN.get("meet_s", session.MEET_S)
(OUT / f"pid-{os.getpid()}").touch()
dist.init_process_group(PLAN.get("backend", "gloo"))
fault("construction", 0)
if "PACELINE_ELASTIC_ATTEMPT" not in os.environ:
    fault("construction as joiner", 0)
torch.manual_seed(0)
random.seed(0)
numpy.random.seed(0)
inner = Model()
model = DDP(inner, bucket_cap_mb=0.001)
optimizer: Any = Optimizer(model.parameters(), lr=1e-2)
if PLAN.get("hook"):
    hooks.register(model, PLAN["hook"], **PLAN.get("hook_options", {}))
if PLAN.get("hook") == "diloco":
    optimizer = hooks.DiLoCoOptimizer(optimizer, period=5)
if PLAN.get("own_hook"):
    model.register_comm_hook(None, average)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
x = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(1))
data = TensorDataset(torch.arange(SAMPLES), x, x[:, :4] * 2)
workers: dict[str, Any] = {
    # Its own generator: each new iterator of a loader draws a seed, also one that begins again.
    "generator": torch.Generator(),
    "num_workers": PLAN.get("workers", 0),
    "persistent_workers": PLAN.get("persistent", False),
    "worker_init_fn": note_worker,
}
sampler: Any
loader: Any
if PLAN.get("iterable"):
    sampler = loader = elastic.IterableCursor(open_stream, 24, **workers)
else:
    micro_batch = PLAN.get("micro_batch")
    sampler = elastic.DistributedSampler(SAMPLES, 24, seed=3, micro_batch=micro_batch)
    loader = DataLoader(data, batch_sampler=sampler, **workers)
state = elastic.State(
    model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, step=0, epoch=0
)
plant_faults(inner)


def note(name: str, what: Any) -> None:
    with (OUT / name).open("a") as file:
        file.write(json.dumps(what) + "\n")


def is_over() -> bool:
    enough = OUT / "enough"  # a step that is far enough away for all ranks to read of it before
    steps = int(enough.read_text()) if enough.exists() else STEPS
    return state.step >= steps and PLAN.get("world", 0) in (0, dist.get_world_size())


def pause_s() -> float:
    return 0.0 if (OUT / "hurry").exists() else PLAN.get("pause_s", 0.0)


def make_groups() -> None:
    """Of the script's own, which it needs anew in every epoch of the membership."""
    if PLAN.get("new_group"):
        fault("new group", state.step)
        dist.new_group()


@elastic.run
def train(state: elastic.State) -> None:
    make_groups()
    while not is_over():
        sampler.set_epoch(state.epoch)
        for indices, inputs, targets in loader:
            # Before the backward: where that raises, others may have its gradients already.
            note(
                f"seen-{MEMBER}", [state.step + 1, state.epoch, sampler.position, indices.tolist()]
            )
            with state.micro_batch() as micro:
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                micro.scale(loss).backward()
            if not micro.is_last:
                continue
            fault("between", state.step)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if PLAN.get("metrics_before_commit"):  # as the docs say that nobody should
                fault("metrics", state.step)
                dist.all_reduce(torch.ones(1))
            state.step += 1
            if state.step % (SAMPLES // 24) == 0:
                state.epoch += 1
            state.commit()
            if PLAN.get("hook") != "diloco":  # which keeps ranks apart between two meetings
                note(f"digests-{MEMBER}", [state.step, digests()])
            if PLAN.get("save") and state.step % PLAN["save"] == 0:
                state.save(OUT / "checkpoints")
            time.sleep(pause_s())
            if is_over():
                return
            if PLAN.get("own_hook"):
                fault("barrier", state.step)
                dist.barrier()


train(state)
if PLAN.get("again"):
    train(state)
result = {"digests": digests(), "step": state.step, "world": dist.get_world_size()}
(OUT / f"done-{MEMBER}").write_text(json.dumps(result))
