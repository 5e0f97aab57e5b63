"""What logical shards cost: beside ordinary accumulation over the same micro-batches.

``python -m benchmarks shards --help``. *Time*: both train the same model in the same processes, in
turn; accumulation runs all micro-batches of a rank but the last under ``no_sync``. *Memory*: the
highest resident memory of a step above that of accumulation, in gradient sets, in fresh processes.
"""

from __future__ import annotations

import argparse
import gc
import math
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import nn

from paceline import DistributedDataParallel as DDP
from paceline.cli.bench.harness import malloc, report, workloads
from paceline.cli.bench.harness.estimates import Estimate, estimate
from paceline.cli.bench.harness.interleave import take_turns
from paceline.cli.bench.harness.options import add_outputs, describe, one_of, positive
from paceline.cli.bench.harness.progress import RoundBar
from paceline.cli.bench.harness.resident import reset_high_water_mark, resident_bytes
from paceline.shards.batches import MicroBatches
from paceline.shards.tree import Shares, owned_shards
from paceline.testing import run_ranks

TARGET = 1.03
MODELS = ("mlp", "transformer", "small")
CONTENDERS = ("accumulation", "shards")
WIDTH, LAYERS = 1000, 30
GRADIENT_BYTES = LAYERS * WIDTH * WIDTH * 4


@dataclass(frozen=True)
class Measured:
    """What one model costs on one number of ranks: shards as a multiple of accumulation."""

    model: str
    ranks: int
    step_ms: float
    wall: Estimate
    cpu: Estimate


@dataclass(frozen=True)
class Memory:
    """Gradient sets above accumulation, at the peak of a step; the most that is allowed."""

    ranks: int
    sets: float
    allowed: float


def accumulate(ddp: Any, micros: list[Any]) -> None:
    """Ordinary accumulation: the last backward reduces the sum."""
    for index, micro in enumerate(micros):
        if index < len(micros) - 1:
            with ddp.no_sync():
                (workloads.loss_of(ddp, micro) / len(micros)).backward()
        else:
            (workloads.loss_of(ddp, micro) / len(micros)).backward()


def run_shards(ddp: Any, micros: list[Any]) -> None:
    """The same over shards."""
    for micro in ddp.shards(MicroBatches(micros)):
        workloads.loss_of(ddp, micro).backward()


def step(name: str, ddp: nn.Module, micros: list[Any]) -> None:
    """One step of a contender, without an optimizer: that is the same for both."""
    ddp.zero_grad()
    (run_shards if name == "shards" else accumulate)(ddp, micros)


def run_rank(model: str, shards: int, bar: RoundBar) -> dict[str, list[tuple[float, float]]]:
    """Measure on one rank: wall and CPU seconds of each turn."""
    malloc.keep_memory()
    owned = owned_shards(shards, dist.get_rank(), dist.get_world_size())
    made = {name: workloads.make(model) for name in CONTENDERS}
    wrapped = {
        "accumulation": DDP(made["accumulation"].module),
        "shards": DDP(made["shards"].module, shards=shards),
    }
    micros = [workloads.batch(made["shards"], seed=shard) for shard in owned]
    for name in CONTENDERS:
        for _ in range(3):
            step(name, wrapped[name], micros)

    def turn(name: str) -> tuple[float, float]:
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        step(name, wrapped[name], micros)
        return time.perf_counter() - wall, time.process_time() - cpu

    bar.is_shown = dist.get_rank() == 0
    return take_turns(CONTENDERS, bar, turn)


def peak_rank(name: str, shards: int) -> int:
    """The highest resident size of later steps above the weights, in a fresh process."""
    malloc.return_memory(64 * 1024)
    rank = dist.get_rank()
    owned = owned_shards(shards, rank, dist.get_world_size())
    arguments: dict[str, Any] = {"shards": shards} if name == "shards" else {}
    micros = [torch.ones(2, 8) for _ in owned]
    tiny = DDP(nn.Linear(8, 8), **arguments)
    for _ in range(3):
        step(name, tiny, micros)
    module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    gc.collect()
    base = resident_bytes("VmRSS", rank)
    ddp = DDP(module, **arguments)
    micros = [torch.ones(2, WIDTH) for _ in owned]
    for _ in range(3):
        step(name, ddp, micros)
    reset_high_water_mark()
    for _ in range(3):
        step(name, ddp, micros)
    return resident_bytes("VmHWM", rank) - base


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    describe(parser, "python -m benchmarks shards --models mlp --ranks 1,2 --check")
    add_outputs(parser, plot=False)
    parser.add_argument("--models", type=one_of(list(MODELS)), default=list(MODELS), metavar="A,B")
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks; default: 1,2")
    parser.add_argument("--shards", type=positive, default=8, help="default: 8")
    parser.add_argument("--rounds", type=positive, default=30, help="default: 30")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")


def run(args: argparse.Namespace) -> int:
    """Measure and show."""
    ranks = [int(word) for word in args.ranks.split(",")]
    times = [_measure(args, model, n) for model in args.models for n in ranks]
    memory = [_measure_memory(args, n) for n in ranks]
    table = Table(title=f"{args.shards} shards beside accumulation of the same micro-batches")
    for name in ("model", "ranks", "step of accumulation", "wall", "CPU"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for found in times:
        cells = (f"{found.step_ms:.1f} ms", f"{found.wall:}", f"{found.cpu:}")
        table.add_row(found.model, str(found.ranks), *cells)
    report.console().print(table)
    for each in memory:
        report.console().print(
            f"{each.ranks} rank(s): {each.sets:.2f} gradient sets more than accumulation; "
            f"allowed are {each.allowed:.2f}"
        )
    results = {"times": [asdict(t) for t in times], "memory": [asdict(m) for m in memory]}
    report.write_json(args.json, results)
    is_slow = any(found.wall.value > TARGET for found in times)
    is_large = any(each.sets > each.allowed for each in memory)
    return int(args.check and (is_slow or is_large))


def _measure(args: argparse.Namespace, model: str, ranks: int) -> Measured:
    bar = RoundBar(f"{model}, {ranks} rank(s)", args.rounds)
    found = run_ranks(ranks, run_rank, model, args.shards, bar, timeout_s=args.timeout)[0]
    pairs = list(zip(found["shards"], found["accumulation"], strict=True))
    return Measured(
        model,
        ranks,
        1e3 * estimate([wall for wall, _ in found["accumulation"]]).value,
        estimate([mine[0] / theirs[0] for mine, theirs in pairs]),
        estimate([mine[1] / theirs[1] for mine, theirs in pairs]),
    )


def _measure_memory(args: argparse.Namespace, ranks: int) -> Memory:
    peaks = {
        name: max(run_ranks(ranks, peak_rank, name, args.shards, timeout_s=args.timeout))
        for name in CONTENDERS
    }
    sets = (peaks["shards"] - peaks["accumulation"]) / GRADIENT_BYTES
    return Memory(ranks, sets, allowed_sets(args.shards, ranks))


def allowed_sets(shards: int, ranks: int) -> float:
    """The bound of docs/same-bits.md: ranks whose shards are no subtree may have more parts."""
    if shards < 50 or all(len(parts) == 1 for parts in Shares(shards, 0, ranks).parts):
        return math.log2(shards / ranks) + 1
    return 2 * math.log2(math.ceil(shards / ranks))
