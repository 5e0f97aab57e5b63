"""What elastic training costs while nothing fails: steps with and without it take turns.

Two ranks train one network in an elastic job: with a coordinator, a thread that listens to it, and
a look at the job's membership after each commit. In turns of a few steps, a step ends with
``state.commit()``, or not. What a turn without has nevertheless is a thread that sleeps, and the
hook that a state hangs on the optimizer.
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
BATCH, STEPS, LAYERS = 64, 12, 4
WIDTHS = {"small": 512, "middle": 1024, "large": 2048}
"""Of the layers of each model: on 2 cores, steps of about 7, 22 and 70 ms."""
_COMMITS = 2000


@dataclass(frozen=True)
class Overhead:
    """What was found with one model, which has no buffers.

    Attributes:
        model: Its name.
        ratio: Of a step with a commit and one without, round by round.
        step_ms: A step without.
        commit_us: A commit, in a loop.
        trained_us: A commit at the end of a step, when nothing of it is in the caches.
    """

    model: str
    ratio: Estimate
    step_ms: float
    commit_us: float
    trained_us: float

    @property
    def is_met(self) -> bool:
        """Whether it meets our targets; an interval of which 1 is no part says it does not."""
        is_free = self.ratio.value <= STEP_LIMIT and self.ratio.low <= 1.0
        return is_free and self.commit_us <= COMMIT_LIMIT_US

    def describe(self) -> str:
        """In words."""
        found = self.ratio
        return (
            f"while nothing fails, {self.model} model: a step with elastic training takes "
            f"{found.value:.4f} [{found.low:.4f}, {found.high:.4f}] x one without "
            f"({self.step_ms:.2f} ms); a commit takes {self.trained_us:.0f} us in training, "
            f"{self.commit_us:.0f} us in a loop"
        )


def measure(rounds: int, timeout_s: float) -> list[Overhead]:
    """Run two ranks for each model."""
    return [_measured(name, rounds, timeout_s) for name in WIDTHS]


def _measured(name: str, rounds: int, timeout_s: float) -> Overhead:
    found = run_ranks(2, _train, name, rounds, timeout_s=timeout_s)
    ratios = [sum(pair) / len(pair) for pair in zip(*(each[0] for each in found), strict=True)]
    return Overhead(
        name,
        estimate(ratios),
        median(each[1] for each in found),
        median(each[2] for each in found),
        median(each[3] for each in found),
    )


Found = tuple[list[float], float, float, float]


def _train(name: str, rounds: int) -> Found:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = WIDTHS[name]
    model = DDP(torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(LAYERS))))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    sampler = elastic.DistributedSampler(1 << 30, 2 * BATCH, shuffle=False)
    state = elastic.State(model=model, optimizer=optimizer, sampler=sampler, step=0)
    found: Found = elastic.run(_take_turns)(state, name, rounds)
    return found


def _take_turns(state: elastic.State, name: str, rounds: int) -> Found:
    assert state.after_commit is not None, "this is no elastic job"
    turns = _Turns(state, WIDTHS[name])
    turns.turn(commits=True)
    turns.commits_us.clear()
    ratios, plain = [], []
    title = f"elastic on and off, {name} model: rounds"
    with RoundBar(title, rounds, is_shown=dist.get_rank() == 0) as bar:
        for number in range(rounds):
            order = shuffled([True, False], f"{number}")
            found = {commits: turns.turn(commits=commits) for commits in order}
            ratios.append(median(found[True]) / median(found[False]))
            plain.append(median(found[False]))
            bar.advance()
    return ratios, 1e3 * median(plain), _commit_us(state), median(turns.commits_us)


class _Turns:
    """Steps of one rank.

    Attributes:
        commits_us: What each commit took.
    """

    def __init__(self, state: elastic.State, width: int) -> None:
        self._state = state
        self._batch = torch.randn(BATCH, width)
        self.commits_us: list[float] = []

    def turn(self, *, commits: bool) -> list[float]:
        """Return the seconds of some steps."""
        state, times = self._state, []
        for _ in range(STEPS):
            began_s = time.perf_counter()
            state.model(self._batch).square().mean().backward()
            state.optimizer.step()
            state.optimizer.zero_grad()
            state.step += 1
            done_s = time.perf_counter()
            if commits:
                state.commit(batches=1)
            ended_s = time.perf_counter()
            times.append(ended_s - began_s)
            if commits:
                self.commits_us.append(1e6 * (ended_s - done_s))
        return times


def _commit_us(state: elastic.State) -> float:
    times = []
    for _ in range(_COMMITS):
        began_ns = time.perf_counter_ns()
        state.commit(batches=0)
        times.append(time.perf_counter_ns() - began_ns)
    return median(times) / 1e3
