"""What ``check_every=100`` costs: steps with and without a look at the parameters, in turns.

Both wrappers train the same model in the same ranks, one step of each in turn; the one compares in
every step. What is printed is the median difference as a share of a step, divided by 100.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from paceline import DistributedDataParallel as DDP
from paceline.cli.bench.harness.options import describe, positive
from paceline.cli.bench.harness.progress import RoundBar
from paceline.testing import run_ranks

EVERY = 100
SKIPPED = 5


def wide() -> nn.Module:
    return nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(6)))


def many() -> nn.Module:
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(300)))


def convolutions() -> nn.Module:
    layers: list[nn.Module] = [nn.Unflatten(1, (1, 32, 32)), nn.Conv2d(1, 32, 3, padding=1)]
    for _ in range(4):
        layers += [nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 1024, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "6 x Linear(2048), 100 MB": (wide, 2048),
    "300 x Linear(32), 600 parameters": (many, 32),
    "5 convolutions with BatchNorm": (convolutions, 1024),
}


def measure(name: str, steps: int, bar: RoundBar) -> list[tuple[float, float]]:
    """In a rank: seconds of each step without and with a check."""
    build, width = MODELS[name]
    runs = [(DDP(build(), check_every=every)) for every in (None, 1)]
    optimizers = [torch.optim.SGD(ddp.parameters(), lr=1e-4) for ddp in runs]
    x = torch.randn(16, width)
    times = []
    bar.is_shown = torch.distributed.get_rank() == 0
    with bar:
        for _ in range(steps):
            pair = []
            for ddp, optimizer in zip(runs, optimizers, strict=True):
                began = time.perf_counter()
                optimizer.zero_grad()
                ddp(x).square().mean().backward()
                optimizer.step()
                pair.append(time.perf_counter() - began)
            times.append((pair[0], pair[1]))
            bar.advance()
    return times[SKIPPED:]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    describe(parser, "python -m benchmarks replicas --steps 20")
    parser.add_argument("--steps", type=positive, default=40, help="default: 40")


def run(args: argparse.Namespace) -> int:
    """Print a line for each model."""
    for name in MODELS:
        steps = args.steps + SKIPPED
        times = run_ranks(2, measure, name, steps, RoundBar(name, steps), timeout_s=300)[0]
        without = statistics.median(a for a, _ in times)
        more = [(b - a) / without for a, b in times]
        low, middle, high = (100 * q for q in statistics.quantiles(more, n=4))
        print(
            f"{name}: step {1e3 * without:.1f} ms; a check costs {middle:.0f} % of a step "
            f"(quartiles {low:.0f} to {high:.0f}), every {EVERY} steps {middle / EVERY:.2f} %"
        )
    return 0
