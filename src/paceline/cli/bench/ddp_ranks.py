"""What the ranks of ``paceline bench ddp`` do: the same step, a rank set for each contender."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch.distributed as dist

from paceline.cli.bench.harness import workloads
from paceline.cli.bench.harness.comparison import Comparison, join_rounds
from paceline.cli.bench.harness.contenders import LOCAL, TORCH, Contender
from paceline.cli.bench.harness.interleave import (
    Cost,
    Samples,
    cpus,
    mean_over_ranks,
    take_turns,
    time_step,
    walls,
)
from paceline.cli.bench.harness.progress import RoundBar
from paceline.cli.bench.harness.rank_sets import RankSets, gradient_norms
from paceline.testing import run_ranks

WARM_UP = 4
"""Steps before anything counts; torch and Paceline rebuild buckets in the second."""
TURN_MS = 200.0
MOST_STEPS = 20


@dataclass(frozen=True)
class Measured:
    """One model on one number of ranks.

    Attributes:
        model: Its name.
        ranks: In each rank set.
        contenders: What was compared, ``local`` first.
        comparison: Wall times; torch is the baseline.
        cpu_ms: CPU times of the same steps.
    """

    model: str
    ranks: int
    contenders: tuple[Contender, ...]
    comparison: Comparison
    cpu_ms: dict[str, list[list[float]]]


def measure(
    model: str, ranks: int, contenders: Sequence[Contender], args: argparse.Namespace
) -> Measured:
    """Launch all rank sets as often as wanted; return what they measured."""
    launches = []
    for seed in range(args.launches):
        title = f"{model}, {ranks} ranks, launch {seed + 1} of {args.launches}"
        launches.append(
            _joined(
                run_ranks(
                    ranks * len(contenders),
                    run_rank,
                    model,
                    tuple(contenders),
                    RoundBar(title, args.rounds),
                    args.steps,
                    seed,
                    timeout_s=args.timeout,
                ),
                ranks,
            )
        )
    samples: Samples = join_rounds(launches)
    times = {each.label: walls(samples)[each.label] for each in contenders}
    comparison = Comparison(f"{model}, {ranks} ranks", TORCH, times, aside=(LOCAL,))
    return Measured(model, ranks, tuple(contenders), comparison, cpus(samples))


def run_rank(
    model: str, contenders: tuple[Contender, ...], bar: RoundBar, steps: int | None, seed: int
) -> Samples:
    """Be a rank of one contender's set; return its costs."""
    ranks = dist.get_world_size() // len(contenders)
    sets = RankSets(ranks, [each.label for each in contenders])
    contender = next(each for each in contenders if each.label == sets.name)
    workload = workloads.make(model)
    options = {"process_group": sets.group} if contender.path else {}
    wrapped = contender.wrap(workload.module, **options)
    batch = workloads.batch(workload, seed=sets.rank)
    count = steps or 1

    def turn(name: str) -> list[Cost]:
        run = lambda: [time_step(wrapped, batch) for _ in range(count)]  # noqa: E731
        return sets.on_turn(name, run) or []

    warm = [cost for _ in range(WARM_UP) for each in contenders for cost in turn(each.label)]
    if different := sets.check_same(gradient_norms(wrapped) if contender.reduces_exactly else None):
        raise AssertionError(f"gradients of {different} and of the first one differ")
    count = steps or _agreed_steps(warm)
    bar.is_shown = dist.get_rank() == 0
    return {sets.name: take_turns([c.label for c in contenders], bar, turn, seed)[sets.name]}


def _agreed_steps(warm: list[Cost]) -> int:
    """How many steps fill a turn: the same on all ranks of all sets."""
    counts: list[int] = [0] * dist.get_world_size()
    mine = int(TURN_MS / max(median(cost.wall_ms for cost in warm), 1e-3))
    dist.all_gather_object(counts, mine)
    return min(MOST_STEPS, max(1, int(median(counts))))


def _joined(per_rank: Sequence[Samples], ranks: int) -> Samples:
    """Average over the ranks of each set, and put sets side by side."""
    joined: Samples = {}
    for first in range(0, len(per_rank), ranks):
        joined |= mean_over_ranks(per_rank[first : first + ranks])
    return joined
