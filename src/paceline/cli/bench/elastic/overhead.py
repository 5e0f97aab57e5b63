"""What elastic training costs while nothing fails: steps with and without it take turns.

Two ranks train one network. In turns of a few steps, a step ends with ``state.commit()``, or not;
the hook that a state hangs on the optimizer is there in both, as it costs less than can be seen.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from paceline import DistributedDataParallel as DDP
from paceline import elastic
from paceline.cli.bench.harness.estimates import Estimate, estimate
from paceline.cli.bench.harness.interleave import shuffled
from paceline.cli.bench.harness.progress import RoundBar
from paceline.testing import run_ranks

STEP_LIMIT, COMMIT_LIMIT_US = 1.005, 50.0
"""Targets of ours."""
WIDTH, BATCH, STEPS = 1024, 64, 12
_COMMITS = 2000


@dataclass(frozen=True)
class Overhead:
    """What was found.

    Attributes:
        ratio: Of a step with a commit and one without, round by round.
        step_ms: A step without.
        commit_us: A commit of a model without buffers.
    """

    ratio: Estimate
    step_ms: float
    commit_us: float

    def describe(self) -> str:
        """In words."""
        found = self.ratio
        return (
            f"while nothing fails: a step with elastic training takes {found.value:.4f} "
            f"[{found.low:.4f}, {found.high:.4f}] x one without ({self.step_ms:.2f} ms); "
            f"a commit takes {self.commit_us:.0f} us"
        )


def measure(rounds: int, timeout_s: float) -> Overhead:
    """Run two ranks."""
    found = run_ranks(2, _train, rounds, timeout_s=timeout_s)
    ratios = [sum(pair) / len(pair) for pair in zip(*(each[0] for each in found), strict=True)]
    return Overhead(
        estimate(ratios),
        median(each[1] for each in found),
        median(each[2] for each in found),
    )


def _train(rounds: int) -> tuple[list[float], float, float]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DDP(torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    sampler = elastic.DistributedSampler(1 << 30, 2 * BATCH, shuffle=False)
    state = elastic.State(model=model, optimizer=optimizer, sampler=sampler, step=0)
    batch = torch.randn(BATCH, WIDTH)

    def turn(commits: bool) -> list[float]:
        times = []
        for _ in range(STEPS):
            began_s = time.perf_counter()
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            state.step += 1
            if commits:
                state.commit()
            times.append(time.perf_counter() - began_s)
        return times

    turn(True)
    ratios, plain = [], []
    with RoundBar("elastic on and off: rounds", rounds, is_shown=dist.get_rank() == 0) as bar:
        for number in range(rounds):
            order = shuffled([True, False], f"{number}")
            found = {commits: turn(commits) for commits in order}
            ratios.append(median(found[True]) / median(found[False]))
            plain.append(median(found[False]))
            bar.advance()
    return ratios, 1e3 * median(plain), _commit_us(state)


def _commit_us(state: elastic.State) -> float:
    times = []
    for _ in range(_COMMITS):
        began_ns = time.perf_counter_ns()
        state.commit(batches=0)
        times.append(time.perf_counter_ns() - began_ns)
    return median(times) / 1e3
