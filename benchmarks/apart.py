"""Variants in processes of their own that still take turns (``ddp_step --apart``).

Where several wrappers share a process, they share its malloc: what one tells it holds for all. Here
a *company* of ranks runs one variant and nothing else, in a group of its own, as a script would.
All companies live at the same time and run their blocks in the shuffled order of a round, while the
others sleep at a barrier; so ratios are taken round by round, as everywhere
([Note: interleaving] in :mod:`benchmarks.interleave`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from benchmarks import workloads
from benchmarks.interleave import (
    Cost,
    Samples,
    Schedule,
    mean_over_ranks,
    shuffled,
    time_step,
)
from benchmarks.progress import RoundBar


def run_company_rank(schedule: Schedule, bar: RoundBar, ranks: int) -> Samples:
    """Run the variant of this rank's company; called on every rank of every company."""
    number, rank = divmod(dist.get_rank(), ranks)
    companies = [
        dist.new_group(range(first, first + ranks))
        for first in range(0, ranks * len(schedule.variants), ranks)
    ]
    group, variant = companies[number], schedule.variants[number]
    model = variant.wrap(workloads.build(schedule.workload), process_group=group)
    batch = workloads.batch(schedule.workload, seed=rank)

    def run_block(turn: int, steps: int) -> list[Cost]:
        dist.barrier()
        if turn != number:
            return []
        dist.barrier(group)
        return [time_step(model, batch) for _ in range(steps)]

    turns = list(range(len(companies)))
    for turn in turns:
        run_block(turn, schedule.warm_up)
    blocks: list[list[Cost]] = []
    with bar:
        for round_number in range(schedule.rounds):
            order = shuffled(turns, f"{schedule.seed} {round_number}")
            blocks += [block for turn in order if (block := run_block(turn, schedule.steps))]
            bar.advance()
    dist.barrier()
    return {variant.label: blocks}


def join_companies(per_rank: Sequence[Samples], ranks: int) -> Samples:
    """Average over the ranks of each company, and put companies side by side."""
    joined: Samples = {}
    for first in range(0, len(per_rank), ranks):
        joined |= mean_over_ranks(per_rank[first : first + ranks])
    return joined
