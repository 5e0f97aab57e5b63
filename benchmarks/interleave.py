"""The inside of a rank: run variants in turn, so that all of them see the same noise.

[Note: interleaving]
Machines are shared and clocks move, so times of two separate runs cannot be compared. Here all
variants live in the same processes. A round runs every variant once, a few steps each, in an order
that is shuffled anew per round (the same on all ranks): what disturbs the machine for a second
disturbs all variants alike, and no variant always follows the same neighbour. Ratios are then taken
round by round. Beside the wall clock stands the CPU time of the whole process, which other programs
on the machine disturb less, though it does not see waiting.

One thing rounds cannot average out: where in memory a model came to lie, which is worth 2 to 3 % of
a transformer's step. So there are several launches, in fresh processes, and each builds the models
in another order.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import malloc, workloads
from benchmarks.progress import RoundBar
from benchmarks.variants import LOCAL, Variant

T = TypeVar("T")


class Cost(NamedTuple):
    """What one step took."""

    wall_ms: float
    cpu_ms: float


Samples = dict[str, list[list[Cost]]]
"""Costs by label, round, step."""

Step = Callable[[nn.Module, torch.Tensor], Cost]
"""Runs one step and returns the cost of the part that counts."""


@dataclass(frozen=True)
class Schedule:
    """What a rank is to run.

    Attributes:
        workload: A key of :data:`benchmarks.workloads.WORKLOADS`.
        variants: What to compare.
        rounds: How many rounds are measured.
        steps: Steps of each variant in a round.
        seed: Decides about the order of building and of running; another one for each launch.
        warm_up: Steps of each variant before; torch and Paceline rebuild buckets in the second.
        are_all_reduced: All variants but `local` reduce gradients, so they must agree: checked.
        is_malloc_steady: Take the luck out of page faults (:mod:`benchmarks.malloc`).
    """

    workload: str
    variants: tuple[Variant, ...]
    rounds: int
    steps: int
    seed: int = 0
    warm_up: int = 4
    are_all_reduced: bool = True
    is_malloc_steady: bool = True


class Stopwatch:
    """Both clocks, started together."""

    def __init__(self) -> None:
        self._cpu_ns = time.process_time_ns()
        self._wall_ns = time.perf_counter_ns()

    def read(self) -> Cost:
        """Return what has passed."""
        wall_ns = time.perf_counter_ns() - self._wall_ns
        return Cost(wall_ns / 1e6, (time.process_time_ns() - self._cpu_ns) / 1e6)


def time_step(model: nn.Module, batch: torch.Tensor) -> Cost:
    """Forward, backward, and the zero_grad before them. No optimizer: it is the same for all."""
    watch = Stopwatch()
    model.zero_grad(set_to_none=True)
    model(batch).square().mean().backward()
    return watch.read()


def time_forward(model: nn.Module, batch: torch.Tensor) -> Cost:
    """Only the forward; the backward runs too."""
    model.zero_grad(set_to_none=True)
    watch = Stopwatch()
    output = model(batch)
    cost = watch.read()
    output.square().mean().backward()
    return cost


def time_backward(model: nn.Module, batch: torch.Tensor) -> Cost:
    """Only the backward."""
    model.zero_grad(set_to_none=True)
    loss = model(batch).square().mean()
    watch = Stopwatch()
    loss.backward()
    return watch.read()


def run_rank(schedule: Schedule, bar: RoundBar, step: Step = time_step) -> Samples:
    """Run a schedule; called on every rank."""
    if schedule.is_malloc_steady:
        malloc.keep_memory()
    elif len(schedule.variants) > 1:  # no wrapper decides for the others
        malloc.leave_alone()
    models = build_models(schedule)
    batch = workloads.batch(schedule.workload, seed=dist.get_rank())
    for model in models.values():
        for _ in range(schedule.warm_up):
            step(model, batch)
    if schedule.are_all_reduced:
        check_same_gradients(models)
    samples: Samples = {variant.label: [] for variant in schedule.variants}
    with bar:
        for number in range(schedule.rounds):
            for label in shuffled(list(samples), f"{schedule.seed} {number}"):
                samples[label].append(_run_block(models[label], batch, schedule.steps, step))
            bar.advance()
    return samples


def build_models(schedule: Schedule) -> dict[str, nn.Module]:
    """Wrap one copy of the model per variant."""
    return {
        variant.label: variant.wrap(workloads.build(schedule.workload))
        for variant in shuffled(schedule.variants, f"{schedule.seed}")
    }


def check_same_gradients(models: dict[str, nn.Module]) -> None:
    """Refuse to time wrappers that do not agree about the gradients."""
    wrapped = [label for label in models if label != LOCAL]
    for label in wrapped[1:]:
        pairs = zip(models[label].parameters(), models[wrapped[0]].parameters(), strict=True)
        for mine, theirs in pairs:
            if mine.grad is None or theirs.grad is None or not mine.grad.allclose(theirs.grad):
                raise AssertionError(f"gradients of {label!r} and {wrapped[0]!r} differ")


def _run_block(model: nn.Module, batch: torch.Tensor, steps: int, step: Step) -> list[Cost]:
    dist.barrier()  # ranks leave the previous variant at different times
    return [step(model, batch) for _ in range(steps)]


def shuffled(items: Sequence[T], seed: str) -> list[T]:
    """The same order on every rank."""
    return random.Random(seed).sample(items, len(items))


def mean_over_ranks(per_rank: Sequence[Samples]) -> Samples:
    """Average what the ranks measured for the same step.

    The mean, not the maximum: a rank that leaves a step early waits in the next one, and a maximum
    would count that time twice.
    """
    return {
        label: [
            [Cost(*map(mean, zip(*costs, strict=True))) for costs in zip(*blocks, strict=True)]
            for blocks in zip(*(samples[label] for samples in per_rank), strict=True)
        ]
        for label in per_rank[0]
    }


def join_launches(launches: Sequence[Samples]) -> Samples:
    """Put the rounds of several launches one after the other."""
    return {
        label: [block for samples in launches for block in samples[label]] for label in launches[0]
    }


def walls(blocks: list[list[Cost]]) -> list[list[float]]:
    """Only the wall clock, round by round."""
    return [[cost.wall_ms for cost in block] for block in blocks]


def cpus(blocks: list[list[Cost]]) -> list[list[float]]:
    """Only the CPU time, round by round."""
    return [[cost.cpu_ms for cost in block] for block in blocks]
