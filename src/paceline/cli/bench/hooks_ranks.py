"""What each rank of ``paceline bench hooks`` does: the same training step with every hook in turn.

Bytes are what the process really wrote to its sockets, as the kernel counts it. What a hook
computes is the CPU time of the whole process (all threads) in a step, less that of a step with
``noop`` in the same round, so the sending itself is in it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist
from torch import nn

from paceline.cli.bench.harness import malloc, workloads
from paceline.cli.bench.harness.comparison import Comparison
from paceline.cli.bench.harness.contenders import hooked
from paceline.cli.bench.harness.interleave import Cost, take_turns, time_step
from paceline.cli.bench.harness.progress import RoundBar
from paceline.cli.bench.hooks import BASELINE, NOOP
from paceline.errors import ConfigurationError

WARM_UP = 3
_IO = Path("/proc/self/io")


@dataclass(frozen=True)
class StepCost:
    """One step of one hook: both clocks, and what was sent."""

    time: Cost
    sent_bytes: int


@dataclass(frozen=True)
class HookCosts:
    """All steps of rank 0, by hook and round; ``noop`` is the step without communication."""

    rounds: dict[str, list[StepCost]]

    @property
    def names(self) -> list[str]:
        """The hooks that reduce."""
        return [name for name in self.rounds if name != NOOP]

    def sent_bytes(self, name: str) -> int:
        """In a step."""
        return int(median(step.sent_bytes for step in self.rounds[name]))

    def compute_ms(self, name: str) -> list[float]:
        """CPU time beyond that of a step without communication, by round."""
        pairs = zip(self.rounds[name], self.rounds[NOOP], strict=True)
        return [max(0.0, mine.time.cpu_ms - bare.time.cpu_ms) for mine, bare in pairs]

    def step_ms(self, name: str, bits_per_s: float) -> list[float]:
        """Predict steps over such a link, by round."""
        sending_ms = 8e3 * self.sent_bytes(name) / bits_per_s
        pairs = zip(self.compute_ms(name), self.rounds[NOOP], strict=True)
        return [bare.time.wall_ms + compute_ms + sending_ms for compute_ms, bare in pairs]

    def over(self, link: str, bits_per_s: float) -> Comparison:
        """Compare all hooks over such a link."""
        times = {n: [[ms] for ms in self.step_ms(n, bits_per_s)] for n in self.names}
        return Comparison(link, BASELINE, times)


def measure_on_rank(model: str, names: Sequence[str], bar: RoundBar) -> HookCosts:
    """Measure every hook; called on every rank."""
    if not _IO.exists():
        raise ConfigurationError(
            f"bytes are counted by {_IO}, which only Linux has ({sys.platform})"
        )
    malloc.keep_memory()
    workload = workloads.make(model)
    batch = workloads.batch(workload, seed=dist.get_rank())
    everybody = [NOOP, *names]
    models = {name: hooked(name).wrap(copy.deepcopy(workload.module)) for name in everybody}
    for wrapped in models.values():
        for _ in range(WARM_UP):
            time_step(wrapped, batch)
    bar.is_shown = dist.get_rank() == 0
    return HookCosts(take_turns(everybody, bar, lambda name: _step(models[name], batch)))


def _step(model: nn.Module, batch: Any) -> StepCost:
    dist.barrier()
    before = _written_bytes()
    cost = time_step(model, batch)
    return StepCost(cost, _written_bytes() - before)


def _written_bytes() -> int:
    for line in _IO.read_text().splitlines():
        key, _, value = line.partition(":")
        if key == "wchar":
            return int(value)
    raise ConfigurationError(f"{_IO} does not say how many bytes were written")
