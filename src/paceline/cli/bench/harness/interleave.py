"""Contenders take turns, so that all of them see the same noise.

[Note: interleaving]
Machines are shared and clocks move, so times of two separate runs cannot be compared. Here all
contenders live at the same time. A round gives every contender one turn, a few steps each, in an
order that is shuffled anew per round (the same on all ranks): what disturbs the machine for a
second disturbs all contenders alike, and none always follows the same neighbour. Ratios are then
taken round by round. Beside the wall clock stands the CPU time of the whole process, which other
programs on the machine disturb less, though it does not see waiting.

One thing rounds cannot average out: where in memory a model came to lie, which is worth 2 to 3 % of
a transformer's step. So there are several launches, in fresh processes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from statistics import mean
from typing import Any, NamedTuple, TypeVar

from torch import nn

from paceline.cli.bench.harness.progress import RoundBar
from paceline.cli.bench.harness.workloads import loss_of

T = TypeVar("T")


class Cost(NamedTuple):
    """What one step took."""

    wall_ms: float
    cpu_ms: float


Samples = dict[str, list[list[Cost]]]
"""Costs by contender, round, step."""

Step = Callable[[nn.Module, Any], Cost]
"""Runs one step of a model on a batch, and returns the cost of the part that counts."""


def take_turns(
    names: Sequence[str], bar: RoundBar, run_turn: Callable[[str], T], seed: int = 0
) -> dict[str, list[T]]:
    """Give every contender a turn in each round of the bar; return what the turns returned."""
    found: dict[str, list[T]] = {name: [] for name in names}
    with bar:
        for number in range(bar.rounds):
            for name in shuffled(names, f"{seed} {number}"):
                found[name].append(run_turn(name))
            bar.advance()
    return found


def shuffled(items: Sequence[T], seed: str) -> list[T]:
    """The same order on every rank."""
    return random.Random(seed).sample(items, len(items))


class Stopwatch:
    """Both clocks, started together."""

    def __init__(self) -> None:
        self._cpu_ns = time.process_time_ns()
        self._wall_ns = time.perf_counter_ns()

    def read(self) -> Cost:
        """Return what has passed."""
        wall_ns = time.perf_counter_ns() - self._wall_ns
        return Cost(wall_ns / 1e6, (time.process_time_ns() - self._cpu_ns) / 1e6)


def time_step(model: nn.Module, batch: Any) -> Cost:
    """Forward, backward, and the zero_grad before them. No optimizer: it is the same for all."""
    watch = Stopwatch()
    model.zero_grad(set_to_none=True)
    loss_of(model, batch).backward()
    return watch.read()


def mean_over_ranks(per_rank: Sequence[Samples]) -> Samples:
    """Average what the ranks measured for the same step.

    The mean, not the maximum: a rank that leaves a step early waits in the next one, and a maximum
    would count that time twice.
    """
    return {
        name: [
            [Cost(*map(mean, zip(*costs, strict=True))) for costs in zip(*turns, strict=True)]
            for turns in zip(*(samples[name] for samples in per_rank), strict=True)
        ]
        for name in per_rank[0]
    }


def walls(samples: Samples) -> dict[str, list[list[float]]]:
    """Only the wall clock."""
    return {name: [[c.wall_ms for c in turn] for turn in found] for name, found in samples.items()}


def cpus(samples: Samples) -> dict[str, list[list[float]]]:
    """Only the CPU time."""
    return {name: [[c.cpu_ms for c in turn] for turn in found] for name, found in samples.items()}
