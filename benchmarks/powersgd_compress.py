"""How long PowerSGD's compression takes, ours and torch's, on the same buckets in one run.

One rank, so that nothing is sent: what is left is compression, decompression and error feedback.
Both hooks run in turn on copies of the same gradients.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs

from benchmarks import command, malloc, workloads
from paceline import hooks
from paceline.hooks.cost import SampleBucket
from paceline.testing import run_ranks


def run_rank(workload: str, rank: int, rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of each round, by whose hook it is."""
    malloc.keep_memory()
    parameters = [p.detach() for p in workloads.build(workload).parameters()]
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


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line."""
    example = "python -m benchmarks powersgd_compress --ranks 1,2,4"
    parser = command.parser("powersgd_compress", __doc__ or "", example)
    parser.add_argument("--models", type=command.one_of(list(workloads.WORKLOADS)), default=["mlp"])
    parser.add_argument("--ranks", type=command.integers, default=[1, 2, 4], help="of the matrices")
    parser.add_argument("--rounds", type=command.positive, default=15)
    args = parser.parse_args(words)
    return command.guarded(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    table = Table(title="PowerSGD's compression, one rank; ratio: median of rounds")
    for heading in ("model", "rank", "paceline ms", "torch ms", "ratio"):
        table.add_column(heading, justify="right")
    results = []
    for workload in args.models:
        for rank in args.ranks:
            [found] = run_ranks(1, run_rank, workload, rank, args.rounds, timeout_s=args.timeout)
            medians = {name: statistics.median(times) for name, times in found.items()}
            ratio = statistics.median(ratios(found))
            results.append({"model": workload, "rank": rank, "ms": found, "ratio": ratio})
            times = [f"{medians[name]:.1f}" for name in ("paceline", "torch")]
            table.add_row(workload, str(rank), *times, f"{ratio:.2f}")
    command.console().print(table)
    command.write_json(args.json, {"results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
