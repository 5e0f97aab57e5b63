"""What each process of ``paceline bench hybrid`` does: the schedule, the clock, the way out.

Called in the processes by :mod:`paceline.cli.bench.hybrid`. All of them stay for a whole launch.
Each cycle runs one epoch of every route of this run in turn, so that what disturbs the machine
disturbs all routes alike. Must not know how a route works: that is behind :class:`Route`.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from paceline.cli.bench.harness.interleave import take_turns
from paceline.cli.bench.harness.progress import RoundBar
from paceline.cli.bench.hybrid.model import Batch, epoch
from paceline.cli.bench.hybrid.plan import HybridPlan, Role, RouteName
from paceline.cli.bench.hybrid.rpc import RpcRoute, rpc_agent

GROUP_TIMEOUT = datetime.timedelta(seconds=120)


class RouteStep(Protocol):
    """A trainer's end of a route."""

    dense: torch.nn.Module

    def __call__(self, batch: Batch, upcoming: Batch | None = None) -> torch.Tensor:
        """Train on one batch, tables and dense network; return the loss. Another will come."""

    def read_tables(self) -> list[torch.Tensor]:
        """Fetch all tables, in the order of the features."""

    def close(self) -> None:
        """Let go of everything the servers hold for this trainer."""


class Route(Protocol):
    """One way to train the model. Every process calls the method of its role, once."""

    name: RouteName

    def on_master(self, plan: HybridPlan) -> None:
        """Set up what is set up once."""

    def on_server(self, plan: HybridPlan, server: int) -> None:
        """Start to serve; does not block."""

    def on_trainer(self, plan: HybridPlan, group: dist.ProcessGroup) -> RouteStep:
        """Connect to the servers and wrap the dense network for this group of trainers."""


@dataclass(frozen=True)
class EpochSample:
    """One epoch of one trainer."""

    seconds: float
    examples: int
    loss: float


@dataclass(frozen=True)
class TrainerResult:
    """What a trainer returns: its counted epochs by the name of the route."""

    trainer: int
    samples: dict[str, list[EpochSample]]
    notes: dict[str, str]


def joined(runs: Sequence[Sequence[TrainerResult]]) -> list[TrainerResult]:
    """Put the results of several runs together, trainer by trainer."""
    found = [TrainerResult(each.trainer, {}, {}) for each in runs[0]]
    for run in runs:
        for whole, part in zip(found, run, strict=True):
            whole.notes.update(part.notes)
            for route, samples in part.samples.items():
                whole.samples.setdefault(route, []).extend(samples)
    return found


Work = Callable[[HybridPlan, int, dict[str, RouteStep]], Any]
"""What a trainer does, given its number and its end of every route."""


def routes_of(plan: HybridPlan) -> list[Route]:
    """Make the routes of this run, the same in every process."""
    return [_route(name) for name in plan.routes]


def _route(name: RouteName) -> Route:
    if name is not RouteName.PS:
        return RpcRoute(name)
    from paceline.cli.bench.hybrid.ps import PsRoute  # needs pyzmq

    return PsRoute()


def run_process(plan: HybridPlan, work: Work) -> Any:
    """Play one part from start to end; return what ``work`` returned on a trainer, else None.

    Args:
        plan: The same in every process.
        work: What trainers do once the routes stand.
    """
    rank = int(os.environ["RANK"])
    role, number = plan.role_of(rank)
    with rpc_agent(plan, rank) if plan.uses_rpc else contextlib.nullcontext():
        routes = routes_of(plan)
        if role is Role.TRAINER:
            return _train(plan, routes, number, work)
        for route in routes:
            if role is Role.MASTER:
                route.on_master(plan)
            else:
                route.on_server(plan, number)
    return None


def _train(plan: HybridPlan, routes: list[Route], trainer: int, work: Work) -> Any:
    with _trainers(plan, trainer) as group:
        steps = {route.name.value: route.on_trainer(plan, group) for route in routes}
        try:
            return work(plan, trainer, steps)
        finally:
            for step in steps.values():
                step.close()
            steps.clear()
            gc.collect()  # references to the servers' tensors must be gone before RPC ends


def measured_by(bar: RoundBar) -> Work:
    """Return what trainers do in a measurement, with a bar that the first of them draws."""
    return functools.partial(measure, bar=bar)


def measure(
    plan: HybridPlan, trainer: int, steps: dict[str, RouteStep], bar: RoundBar
) -> TrainerResult:
    """Run all cycles; count those after the warm-up."""
    bar.is_shown = trainer == 0
    found = take_turns(list(steps), bar, _epochs_of(plan, trainer, steps), plan.seed)
    samples = {name: epochs[plan.warmup_cycles :] for name, epochs in found.items()}
    return TrainerResult(trainer, samples, {name: _note(step) for name, step in steps.items()})


def _epochs_of(
    plan: HybridPlan, trainer: int, steps: dict[str, RouteStep]
) -> Callable[[str], EpochSample]:
    """Return what runs the next epoch of a route: all routes have the same data in a cycle."""
    cycles = dict.fromkeys(steps, 0)

    def run(name: str) -> EpochSample:
        cycles[name] += 1
        return _run_epoch(steps[name], epoch(plan, trainer, cycles[name] - 1))

    return run


def _run_epoch(step: RouteStep, batches: list[Batch]) -> EpochSample:
    """Train one epoch; trainers begin together, and the garbage collector waits outside."""
    gc.collect()
    dist.barrier()
    began = time.perf_counter()
    losses = [step(*pair) for pair in zip(batches, [*batches[1:], None], strict=True)]
    seconds = time.perf_counter() - began
    loss = float(torch.stack(losses).mean())
    return EpochSample(seconds, sum(batch.examples for batch in batches), loss)


def _note(step: RouteStep) -> str:
    """Say how gradients of the dense network travel."""
    stats = getattr(step.dense, "stats", None)
    return "c10d:gloo" if stats is None else str(stats().transport)


@contextlib.contextmanager
def _trainers(plan: HybridPlan, trainer: int) -> Iterator[dist.ProcessGroup]:
    """Make the group of all trainers; they meet where RPC met, or would have."""
    store = dist.TCPStore(  # type: ignore[attr-defined]
        plan.master_addr,
        plan.master_port,
        is_master=trainer == 0 and not plan.uses_rpc,
        timeout=GROUP_TIMEOUT,
    )
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("trainers", store),  # type: ignore[attr-defined]
        rank=trainer,
        world_size=plan.trainers,
        timeout=GROUP_TIMEOUT,
    )
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
