"""What the other ranks see when one of three goes wrong, under torch's DDP and under Paceline's.

``python -m benchmarks torch_hangs --timeout-s 20``. Each fault happens to rank 1 in step 2, on
gloo. Printed is what every rank raised, and how long after the fault. The result is quoted in
``docs/when-a-rank-fails.md``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.cli.bench.harness import report
from paceline.cli.bench.harness.options import describe, one_of
from paceline.errors import ConfigurationError
from paceline.testing.hosts import LINK, hosts_unavailable_reason, run_on_hosts, test_hosts
from paceline.testing.namespaces import run_here

WORLD = 3
VICTIM = 1
FAULT_STEP = 2
STEPS = 4

FAULTS = {
    "killed": "SIGKILL: the kernel closes the sockets of rank 1",
    "stopped": "SIGSTOP (a debugger, a frozen container): the sockets stay open",
    "elsewhere": "rank 1 has no batch left and waits in a barrier",
    "unused": "rank 1 does not use a layer, catches the error and lives on",
    "link": "the link to rank 1's host is cut (as root, with iproute2)",
}


@dataclass(frozen=True)
class Case:
    """One run: which wrapper, which fault, the group's time-out, where ranks leave their notes."""

    wrapper: str
    fault: str
    timeout_s: float
    folder: Path


class Net(nn.Module):
    """Two layers, the second of which can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, with_head: bool = True) -> torch.Tensor:
        hidden: torch.Tensor = self.body(x)
        return self.head(hidden) if with_head else hidden


def wrapped(name: str) -> nn.Module:
    """Return the network in the wrapper of that name."""
    if name == "torch":
        return nn.parallel.DistributedDataParallel(Net())
    import paceline

    return paceline.DistributedDataParallel(Net())


def strike(case: Case) -> None:
    """Note the time, then do to this process what the fault says."""
    (case.folder / "fault").write_text(str(time.monotonic()))
    if case.fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif case.fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif case.fault == "link":
        run_here("ip", "link", "set", LINK, "down")
    elif case.fault == "elsewhere":
        dist.barrier()


def step(model: nn.Module, case: Case, strikes: bool) -> None:
    """Train one batch; if this rank has the fault, it comes before or inside of the backward."""
    if strikes and case.fault == "elsewhere":
        strike(case)
    loss = model(torch.ones(8, 64), with_head=not (strikes and case.fault == "unused")).sum()
    if strikes:
        loss.register_hook(lambda gradient: strike(case))
    loss.backward()


def train(case: Case) -> None:
    """Train in this rank, and write down how it ended."""
    rank = dist.get_rank()
    outcome = "ended without an error"
    try:
        model = wrapped(case.wrapper)
        for number in range(STEPS):
            step(model, case, strikes=rank == VICTIM and number == FAULT_STEP)
    except Exception as error:
        outcome = f"{type(error).__name__}: {' '.join(str(error).split())}"
    note = {"rank": rank, "at_s": time.monotonic(), "outcome": outcome}
    part = case.folder / f"rank{rank}.part"
    part.write_text(json.dumps(note))
    part.rename(case.folder / f"rank{rank}.json")
    if case.fault == "unused" and rank == VICTIM:
        time.sleep(case.timeout_s + 2)  # alive, its sockets open


def join_and_train(rank: int, case: Case) -> None:
    """Make the group in this rank, then train."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=case.timeout_s)
    store = dist.FileStore(str(case.folder / "store"), WORLD)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timeout)
    train(case)


def local_rank(rank: int, case: Case) -> None:
    """Be one rank on this host."""
    join_and_train(rank, case)
    os._exit(0)  # as after an error: no goodbye to the others


def linked_rank(case: Case) -> None:
    """Be one rank on a test host."""
    join_and_train(int(os.environ["RANK"]), case)


def run_local(case: Case) -> None:
    """Run all ranks as processes of this host, and end those that the fault has stopped."""
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=local_rank, args=(rank, case)) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    try:
        for rank, process in enumerate(ranks):
            if rank != VICTIM:
                process.join(case.timeout_s * 3 + 60)
    finally:
        for process in ranks:
            process.kill()
            process.join()


def run_linked(case: Case) -> None:
    """Run one rank on each of three test hosts."""
    with test_hosts(WORLD) as hosts:
        run_on_hosts(hosts, 1, linked_rank, case, init=False, timeout_s=case.timeout_s * 3 + 60)


def observed(wrapper: str, fault: str, timeout_s: float) -> list[dict[str, Any]]:
    """Run one case and return what each rank noted, with the seconds since the fault."""
    run: Callable[[Case], None] = run_linked if fault == "link" else run_local
    with tempfile.TemporaryDirectory() as folder:
        run(Case(wrapper, fault, timeout_s, Path(folder)))
        struck_s = float((Path(folder) / "fault").read_text())
        notes = [json.loads(file.read_text()) for file in Path(folder).glob("rank*.json")]
    found = {note["rank"]: note for note in notes}
    silent = {"at_s": None, "outcome": "(says nothing)"}
    rows = [{"rank": rank, **found.get(rank, silent)} for rank in range(WORLD)]
    for row in rows:
        at_s = row.pop("at_s")
        row["after_s"] = None if at_s is None else at_s - struck_s
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    describe(parser, "python -m benchmarks torch_hangs --faults killed --timeout-s 20")
    faults = ", ".join(f"{name}: {text}" for name, text in FAULTS.items())
    local = [name for name in FAULTS if name != "link"]
    parser.add_argument(
        "--faults",
        type=one_of(list(FAULTS)),
        default=local,
        metavar="A,B",
        help=f"{faults} (default: all but link)",
    )
    parser.add_argument(
        "--wrappers", type=one_of(["torch", "paceline"]), default=["torch", "paceline"]
    )
    parser.add_argument("--timeout-s", type=float, default=20.0, help="of the group (torch: 1800)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to FILE")


def run(args: argparse.Namespace) -> int:
    """Run the cases and print what each rank raised."""
    if "link" in args.faults and (reason := hosts_unavailable_reason()):
        raise ConfigurationError(f"--faults link: {reason}")
    print(f"gloo, {WORLD} ranks, the group's time-out is {args.timeout_s:g} s\n")
    results: dict[str, Any] = {}
    for fault in args.faults:
        print(f"{fault}: {FAULTS[fault]}")
        for wrapper in args.wrappers:
            rows = results[f"{fault}/{wrapper}"] = observed(wrapper, fault, args.timeout_s)
            for row in rows:
                after = "      " if row["after_s"] is None else f"{row['after_s']:5.1f}s"
                print(f"  {wrapper:9} rank {row['rank']} {after}  {row['outcome'][:300]}")
    report.write_json(args.json, results)
    return 0
