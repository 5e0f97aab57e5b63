"""What recording costs: a share of the step, measured in two ways in the same processes.

``python -m benchmarks recording --help``. Every rank trains one model and records it into a file.

*In place*: every call into the recorder is timed while it trains (caches are as cold as training
leaves them), and the sum over a block is divided by the block. Sharp, but it sees only what it
wraps. A median over single steps would leave out what only some steps do: most records are written
in every tenth step or so.

*On and off*: blocks of steps with and without the recorder, in turn, on the same model, and their
ratio round by round. It sees everything, through the noise of the machine. A block is several times
as long as the recorder keeps steps before it writes them: its last write is not in it.
"""

from __future__ import annotations

import argparse
import functools
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from rich.table import Table

import paceline
from paceline import DistributedDataParallel as DDP
from paceline.cli.bench.harness import report, workloads
from paceline.cli.bench.harness.estimates import Estimate, estimate
from paceline.cli.bench.harness.options import add_outputs, describe, one_of, positive
from paceline.cli.bench.harness.progress import RoundBar
from paceline.ddp import forward_pass
from paceline.ddp.autograd import optimizer_steps
from paceline.ddp.recording import tell_forward
from paceline.observe.run_folder import RUN_DIR
from paceline.testing import run_ranks

LIMIT = 0.005
"""The most that recording may take of a step."""

STEPS = {"mlp": 7, "transformer": 4, "small": 60}
"""Of a block: some 500 ms."""

_CALLS = ("on_forward_end", "on_backward", "on_backward_end", "on_step_end")
_OPTIMIZER_CALLS = ("on_optimizer_begin", "on_optimizer_step")


@dataclass(frozen=True)
class Plan:
    """What a rank is to run."""

    workload: str
    rounds: int
    steps: int


@dataclass(frozen=True)
class Measured:
    """What a rank found: per round, a step of its blocks in place, and its ratios on and off."""

    in_place_us: list[float]
    step_us: list[float]
    wall_ratios: list[float]
    cpu_ratios: list[float]


class Stopwatch:
    """Adds up the time inside of wrapped functions; a call inside of another counts once."""

    def __init__(self) -> None:
        self.ns = self.calls = 0
        self._depth = 0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, timed."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter_ns()
            self._depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.ns += time.perf_counter_ns() - began
                    self.calls += 1

        return timed


class Training:
    """One model with its optimizer and its recorder."""

    def __init__(self, workload: str) -> None:
        made = workloads.make(workload)
        self.model = DDP(made.module)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-6)
        self.batch = workloads.batch(made, seed=torch.distributed.get_rank())
        assert self.model.reducer is not None
        self.clock = self.model.reducer.clock
        self.observer: Any = self.clock.observer
        assert self.observer is not None, f"{RUN_DIR} is not set, or its folder cannot be written"

    def step(self) -> None:
        """As users write it, with a loss that is logged."""
        self.optimizer.zero_grad()
        loss = workloads.loss_of(self.model, self.batch)
        loss.backward()
        self.optimizer.step()
        if self.clock.observer is not None:
            paceline.log(loss=loss)

    def block(self, steps: int, *, is_recorded: bool) -> tuple[float, float]:
        """Run steps; return wall and CPU seconds."""
        self.clock.observer = self.observer if is_recorded else None
        if not is_recorded:  # hooks of optimizers stay: without a step they have nothing to record
            self.observer._recorder.finish_steps(None, is_end=True)
        torch.distributed.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self.step()
        return time.perf_counter() - wall, time.process_time() - cpu


def run_rank(plan: Plan, bar: RoundBar) -> Measured:
    """Measure on one rank."""
    training = Training(plan.workload)
    for _ in range(5):
        training.step()
    draw, walls, cpus = random.Random(1), [], []
    bar.is_shown = torch.distributed.get_rank() == 0
    with bar:
        for _ in range(plan.rounds):
            order = draw.sample([True, False], 2)
            found = {on: training.block(plan.steps, is_recorded=on) for on in order}
            walls.append(found[True][0] / found[False][0])
            cpus.append(found[True][1] / found[False][1])
            bar.advance()
    return Measured(*_time_in_place(training, plan), walls, cpus)


def _time_in_place(training: Training, plan: Plan) -> tuple[list[float], list[float]]:
    watch, own_ns = Stopwatch(), _own_ns()
    for name in (*_CALLS, *_OPTIMIZER_CALLS):
        setattr(training.observer, name, watch.wrap(getattr(training.observer, name)))
    setattr(forward_pass, "tell_forward", watch.wrap(tell_forward))  # noqa: B010
    registry = optimizer_steps._registry  # one of its two look-ups a step is the recorder's
    registry.told_by = watch.wrap(registry.told_by)  # type: ignore[method-assign]
    training.clock.observer = training.observer
    paceline.log = watch.wrap(paceline.log)
    inside, steps = [], []
    for _ in range(plan.rounds):
        watch.ns, watch.calls, began = 0, 0, time.perf_counter_ns()
        for _ in range(plan.steps):
            training.step()
        steps.append((time.perf_counter_ns() - began) / 1e3 / plan.steps)
        inside.append(max(0.0, watch.ns - watch.calls * own_ns) / 1e3 / plan.steps)
    return inside, steps


def _own_ns(calls: int = 2000) -> float:
    """What the stopwatch counts for a function that does nothing."""
    watch = Stopwatch()
    nothing = watch.wrap(lambda: None)
    for _ in range(calls):
        nothing()
    return watch.ns / calls


# --- the command ----------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    describe(parser, "python -m benchmarks recording --models small --ranks 2 --check")
    add_outputs(parser, plot=False)
    parser.add_argument(
        "--models",
        type=one_of(list(STEPS)),
        default=list(STEPS),
        metavar="A,B",
        help="default: all",
    )
    parser.add_argument("--ranks", type=positive, default=2, help="default: 2")
    parser.add_argument("--rounds", type=positive, default=60, help="default: 60")
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 if it is more than 0.5 %% in place"
    )


def run(args: argparse.Namespace) -> int:
    """Measure and show."""
    results = {name: _measure(args, name) for name in args.models}
    table = Table(title=f"recording, {args.ranks} rank(s): share of a step")
    columns = ("model", "step", "in the recorder", "in place", "on / off, wall", "on / off, CPU")
    for name in columns:
        table.add_column(name, justify="left" if name == "model" else "right", no_wrap=True)
    for name, found in results.items():
        table.add_row(name, *_cells(found))
    report.console().print(table)
    report.write_json(args.json, {name: asdict(found) for name, found in results.items()})
    return int(args.check and any(_share(found).high > LIMIT for found in results.values()))


def _measure(args: argparse.Namespace, name: str) -> Measured:
    plan = Plan(name, args.rounds, STEPS[name])
    bar = RoundBar(name, args.rounds)
    with tempfile.TemporaryDirectory(prefix="paceline-recording-") as folder:
        env = {RUN_DIR: folder}
        found = run_ranks(args.ranks, run_rank, plan, bar, timeout_s=args.timeout, env=env)
    return found[0]


def _share(found: Measured) -> Estimate:
    pairs = zip(found.in_place_us, found.step_us, strict=True)
    return estimate([inside / step for inside, step in pairs])


def _cells(found: Measured) -> list[str]:
    inside = estimate(found.in_place_us)
    return [
        f"{median(found.step_us) / 1e3:.2f} ms",
        f"{inside.value:.1f} ({inside.low:.1f} to {inside.high:.1f}) us",
        _percent(_share(found)),
        _percent(estimate([ratio - 1 for ratio in found.wall_ratios])),
        _percent(estimate([ratio - 1 for ratio in found.cpu_ratios])),
    ]


def _percent(share: Estimate) -> str:
    return f"{share.value:.2%} ({share.low:.2%} to {share.high:.2%})"
