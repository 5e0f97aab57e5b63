"""What the process of ``paceline bench dp`` does: the plain module and its replicas in turn."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn

import paceline
from paceline.cli.bench.dp import CONTROL, PARALLEL, PLAIN
from paceline.cli.bench.harness import malloc
from paceline.cli.bench.harness.comparison import Comparison, join_rounds
from paceline.cli.bench.harness.interleave import (
    Cost,
    Samples,
    Stopwatch,
    take_turns,
    time_step,
    walls,
)
from paceline.cli.bench.harness.progress import RoundBar
from paceline.testing import run_ranks


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
    return nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048), nn.ReLU()) for _ in range(4)))


def _small() -> nn.Module:
    layers = (nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(20))
    return nn.Sequential(*layers)


@dataclass(frozen=True)
class Work:
    """A model, the shape of its batch, and how many steps make a turn."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    steps: int


WORK = {
    "matmul": Work(_matmul, (1024, 2048), 1),
    "lstm": Work(Recurrent, (64, 100, 256), 2),
    "cells": Work(Cells, (64, 100, 256), 2),
    "small": Work(_small, (64, 64), 10),
}


def measure(name: str, args: argparse.Namespace) -> Comparison:
    """Run one model in fresh processes, as often as wanted."""
    launches = []
    for seed in range(args.launches):
        bar = RoundBar(f"{name}, launch {seed + 1} of {args.launches}", args.rounds)
        [samples] = run_ranks(
            1,
            run_model,
            name,
            bar,
            (args.steps or WORK[name].steps, args.replicas, seed),
            threads=args.threads,
            timeout_s=args.timeout,
        )
        launches.append(walls(samples))
    return Comparison(name, PLAIN, join_rounds(launches), aside=(CONTROL,))


def run_model(name: str, bar: RoundBar, counts: tuple[int, int, int]) -> Samples:
    """Alternate the contenders; called in a fresh process. Counts: steps, replicas, seed."""
    steps, replicas, seed = counts
    malloc.keep_memory()
    torch.manual_seed(0)
    module = WORK[name].build()
    batch = torch.randn(WORK[name].shape)
    parallel = paceline.DataParallel(module, ["cpu"] * replicas)
    models: dict[str, nn.Module] = {PLAIN: module, CONTROL: module, PARALLEL: parallel}
    _check_same_gradients(module, parallel, batch)

    def turn(label: str) -> list[Cost]:
        return [time_step(models[label], batch) for _ in range(steps)]

    for label in models:
        turn(label)
    return take_turns(list(models), bar, turn, seed)


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


def measure_parts(args: argparse.Namespace) -> float:
    """Return the median milliseconds of scatter + replicate + gather of 100 parameters."""
    [found] = run_ranks(1, run_parts, 50 * args.rounds, args.replicas, threads=args.threads)
    return float(median(found))


def run_parts(rounds: int, replicas: int) -> list[float]:
    """Time the parts of a DataParallel forward that are not the module's; in a fresh process."""
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(50)))
    batch, devices = torch.randn(8, 8), ["cpu"] * replicas
    times = []
    for _ in range(rounds):
        watch = Stopwatch()
        pieces, _ = paceline.scatter_kwargs((batch,), {}, devices)
        copies = paceline.replicate(module, devices)
        paceline.gather([piece for (piece,) in pieces], "cpu")
        times.append(watch.read().wall_ms)
        del copies
    return times
