"""DataParallel on 2 CPU replicas beside the plain module with the same number of threads.

``python -m benchmarks.data_parallel --help``. Forward + backward, one process, interleaved; then
what scatter, replicate and gather cost for 100 parameters.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table
from torch import nn

import paceline
from benchmarks import command, malloc
from benchmarks.interleave import Cost, Samples, Stopwatch, cpus, join_launches, time_step, walls
from benchmarks.ratios import Estimate, p50, ratio
from paceline.testing import run_ranks

PLAIN, CONTROL, PARALLEL = "plain", "plain again", "replicas"
PARTS_LIMIT_MS = 1.0


class Recurrent(nn.Module):
    """One LSTM layer, in one operation."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(256, 256, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return all hidden states."""
        output: torch.Tensor = self.lstm(x)[0]
        return output


class Cells(nn.Module):
    """The same, as a loop in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last hidden state."""
        state: tuple[torch.Tensor, torch.Tensor] | None = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        assert state is not None
        return state[0]


def _matmul() -> nn.Module:
    layers = (nn.Sequential(nn.Linear(2048, 2048), nn.ReLU()) for _ in range(4))
    return nn.Sequential(*layers)


def _small() -> nn.Module:
    layers = (nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(20))
    return nn.Sequential(*layers)


@dataclass(frozen=True)
class Workload:
    """A model, its batch, and what the ratio to the plain module may be (None: no target)."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    steps: int
    limit: float | None


WORKLOADS: dict[str, Workload] = {
    "matmul": Workload(_matmul, (1024, 2048), 1, 1.25),
    "lstm": Workload(Recurrent, (64, 100, 256), 2, 1.25),
    "cells": Workload(Cells, (64, 100, 256), 2, None),
    "small": Workload(_small, (64, 64), 10, None),
}


@dataclass(frozen=True)
class Result:
    """What was measured for one workload."""

    workload: str
    samples: Samples

    def against_plain(self, label: str) -> Estimate:
        """The ratio of wall times, round by round."""
        return ratio(walls(self.samples[label]), walls(self.samples[PLAIN]))

    def cpu_against_plain(self, label: str) -> Estimate:
        """The ratio of CPU times: on a busy machine the steadier one, though it sees no waiting."""
        return ratio(cpus(self.samples[label]), cpus(self.samples[PLAIN]))

    @property
    def limit(self) -> float | None:
        """The target of this workload."""
        return WORKLOADS[self.workload].limit

    @property
    def is_met(self) -> bool:
        """Whether the ratio is within the target, if there is one."""
        return self.limit is None or self.against_plain(PARALLEL).value <= self.limit

    def to_json(self) -> dict[str, Any]:
        """All numbers."""
        return {
            "workload": self.workload,
            "p50_ms": {label: p50(walls(blocks)) for label, blocks in self.samples.items()},
            "against_plain": {
                label: asdict(self.against_plain(label)) for label in (PARALLEL, CONTROL)
            },
            "cpu_against_plain": {
                label: asdict(self.cpu_against_plain(label)) for label in (PARALLEL, CONTROL)
            },
            "limit": self.limit,
            "is_met": self.is_met,
            "samples_wall_cpu_ms": self.samples,
        }


def run_workload(name: str, rounds: int, steps: int | None, seed: int) -> Samples:
    """Alternate the variants; called in a fresh process."""
    malloc.keep_memory()
    torch.manual_seed(0)
    workload = WORKLOADS[name]
    module = workload.build()
    batch = torch.randn(workload.shape)
    models: dict[str, nn.Module] = {
        PLAIN: module,
        CONTROL: module,
        PARALLEL: paceline.DataParallel(module, ["cpu", "cpu"]),
    }
    _check_same_gradients(module, models[PARALLEL], batch)
    samples: Samples = {label: [] for label in models}
    for number in range(rounds + 1):
        for label in random.Random(f"{seed} {number}").sample(list(models), len(models)):
            block = [time_step(models[label], batch) for _ in range(steps or workload.steps)]
            if number:  # the first round warms up
                samples[label].append(block)
    return samples


def _check_same_gradients(plain: nn.Module, parallel: nn.Module, batch: torch.Tensor) -> None:
    """Refuse to time what does not agree."""
    gradients = []
    for model in (plain, parallel):
        plain.zero_grad()
        model(batch).square().mean().backward()
        gradients.append([p.grad.clone() for p in plain.parameters() if p.grad is not None])
    for one, other in zip(*gradients, strict=True):
        if not torch.allclose(one, other, rtol=1e-3, atol=1e-5):
            raise AssertionError("gradients of the replicas and of the plain module differ")


def run_parts(rounds: int) -> list[Cost]:
    """Time scatter + replicate + gather of a module with 100 parameters, for 2 CPU replicas."""
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(50)))
    batch, devices = torch.randn(8, 8), ["cpu", "cpu"]
    costs = []
    for _ in range(rounds):
        watch = Stopwatch()
        pieces, _ = paceline.scatter_kwargs((batch,), {}, devices)
        replicas = paceline.replicate(module, devices)
        paceline.gather([piece for (piece,) in pieces], "cpu")
        costs.append(watch.read())
        del replicas
    return costs


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, measure, print; 1 with --check if a target is missed."""
    args = _parser().parse_args(argv)
    return command.guarded(lambda: _run(args))


def _parser() -> argparse.ArgumentParser:
    parser = command.parser(
        "data_parallel",
        "Forward + backward on 2 CPU replicas beside the plain module, in one process.",
        "python -m benchmarks.data_parallel --models lstm --rounds 20 --check",
    )
    names = list(WORKLOADS)
    parser.add_argument(
        "--models",
        type=command.one_of(names),
        default=names,
        metavar="A,B",
        help=f"of {','.join(names)} (default: all)",
    )
    parser.add_argument(
        "--threads", type=command.positive, default=2, help="intra-op threads (default: 2)"
    )
    parser.add_argument(
        "--launches", type=command.positive, default=2, help="in fresh processes (default: 2)"
    )
    parser.add_argument("--rounds", type=command.positive, default=10, help="default: 10")
    parser.add_argument("--steps", type=command.positive, help="of a variant in a round")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    return parser


def _run(args: argparse.Namespace) -> int:
    results = [_measure(args, name) for name in args.models]
    (parts,) = run_ranks(1, run_parts, 50 * args.rounds, threads=args.threads)
    parts_ms = median(cost.wall_ms for cost in parts)
    console = command.console()
    console.print(_table(results))
    console.print(
        f"scatter + replicate + gather, 100 parameters, 2 replicas: {parts_ms:.2f} ms "
        f"(target {PARTS_LIMIT_MS:.1f} ms)"
    )
    measured = [result.to_json() for result in results]
    command.write_json(args.json, {"results": measured, "parts_ms": parts_ms})
    is_met = parts_ms <= PARTS_LIMIT_MS and all(result.is_met for result in results)
    return 1 if args.check and not is_met else 0


def _measure(args: argparse.Namespace, name: str) -> Result:
    launches = []
    for seed in range(args.launches):
        (samples,) = run_ranks(
            1,
            run_workload,
            name,
            args.rounds,
            args.steps,
            seed,
            threads=args.threads,
            timeout_s=args.timeout,
        )
        launches.append(samples)
    return Result(name, join_launches(launches))


def _table(results: Sequence[Result]) -> Table:
    title = "forward + backward, one process; ratios: median of rounds [95 % interval]"
    table = Table(title=escape(title))
    for heading in ("model", "variant", "p50 ms", "CPU ms", "/ plain", "CPU / plain", "target"):
        is_text = heading in ("model", "variant")
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=True)
    for result in results:
        for label, blocks in result.samples.items():
            table.add_row(
                result.workload if label == PLAIN else "",
                label,
                f"{p50(walls(blocks)):.1f}",
                f"{p50(cpus(blocks)):.1f}",
                "" if label == PLAIN else escape(str(result.against_plain(label))),
                "" if label == PLAIN else f"{result.cpu_against_plain(label).value:.3f}",
                _judgement(result) if label == PARALLEL else "",
            )
        table.add_section()
    return table


def _judgement(result: Result) -> str:
    if result.limit is None:
        return "none"
    word = "[green]met[/green]" if result.is_met else "[red]missed[/red]"
    return f"<= {result.limit:.2f} {word}"


if __name__ == "__main__":
    sys.exit(main())
