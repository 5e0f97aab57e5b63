"""How long PowerSGD's compression takes, ours and torch's, on the same buckets in one run.

One rank, so that nothing is sent: what is left is compression, decompression and error feedback.
Both hooks run in turn on copies of the same gradients.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from rich.table import Table
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs

from paceline import hooks
from paceline.cli.bench.harness import malloc, report, workloads
from paceline.cli.bench.harness.models import MODELS
from paceline.cli.bench.harness.options import add_outputs, describe, integers, one_of, positive
from paceline.cli.bench.harness.progress import RoundBar
from paceline.hooks.cost import SampleBucket
from paceline.testing import run_ranks


def run_rank(workload: str, rank: int, rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of each round, by whose hook it is."""
    malloc.keep_memory()
    parameters = [p.detach() for p in workloads.make(workload).module.parameters()]
    options: dict[str, Any] = {"matrix_approximation_rank": rank, "start_powerSGD_iter": 2}
    pairs: dict[str, tuple[Any, Any]] = {
        "paceline": (hooks.PowerSGDState(None, **options), hooks.powerSGD_hook),
        "torch": (torchs.PowerSGDState(None, **options), torchs.powerSGD_hook),
    }
    found: dict[str, list[float]] = {name: [] for name in pairs}
    for turn in range(rounds + 4):  # two without compression, two to get warm
        for name, (state, hook) in pairs.items():
            bucket = SampleBucket(parameters, 0)
            start_s = time.perf_counter()
            hook(state, bucket).wait()
            if turn >= 4:
                found[name].append((time.perf_counter() - start_s) * 1e3)
    return found


def ratios(found: dict[str, list[float]]) -> list[float]:
    """Return ours over torch's, round by round."""
    return [a / b for a, b in zip(found["paceline"], found["torch"], strict=True)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    describe(parser, "python -m benchmarks powersgd_compress --ranks 1,2,4")
    add_outputs(parser, plot=False)
    parser.add_argument("--models", type=one_of(list(MODELS)), default=["mlp"])
    parser.add_argument("--ranks", type=integers, default=[1, 2, 4], help="of the matrices")
    parser.add_argument("--rounds", type=positive, default=15)


def run(args: argparse.Namespace) -> int:
    """Measure and show."""
    table = Table(title="PowerSGD's compression, one rank; ratio: median of rounds")
    for heading in ("model", "rank", "paceline ms", "torch ms", "ratio"):
        table.add_column(heading, justify="right")
    results = []
    pairs = [(workload, rank) for workload in args.models for rank in args.ranks]
    with RoundBar("models and ranks", len(pairs)) as bar:
        for workload, rank in pairs:
            [found] = run_ranks(1, run_rank, workload, rank, args.rounds, timeout_s=args.timeout)
            bar.advance(f"{workload}, {rank}")
            medians = {name: statistics.median(times) for name, times in found.items()}
            ratio = statistics.median(ratios(found))
            results.append({"model": workload, "rank": rank, "ms": found, "ratio": ratio})
            times = [f"{medians[name]:.1f}" for name in ("paceline", "torch")]
            table.add_row(workload, str(rank), *times, f"{ratio:.2f}")
    report.console().print(table)
    report.write_json(args.json, {"results": results})
    return 0
