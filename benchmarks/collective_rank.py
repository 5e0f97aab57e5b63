"""What one rank does in the benchmark of all-reduce: every engine in turn, on the same tensor.

[Note: in turn] A round is one block of calls for each engine, in an order that changes from round
to round. Engines are compared inside of a round, so that a machine that is busy for a while is busy
for all of them.

Run by :mod:`benchmarks.collectives`; with MPI through mpirun, as ``python -m
benchmarks.collective_rank PLAN RESULT``, because MPI wants to start its processes itself.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import paceline  # noqa: F401  # registers the backend

Engine = Callable[[torch.Tensor], Any]
Samples = dict[str, dict[str, list[list[float]]]]
"""By size (as text: this travels as JSON), then by engine: the seconds of each call, by round."""

CALLS = {1 << 10: 200, 1 << 17: 100, 1 << 21: 30, 1 << 26: 4}
"""Calls in a block, for tensors up to so many bytes; 2 for larger ones."""
WARM_UP = 3


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        ranks: How many.
        sizes: Bytes of the tensors.
        rounds: How often each engine has its turn.
        store: A file for the ranks to meet at.
    """

    ranks: int
    sizes: tuple[int, ...]
    rounds: int
    store: str = ""


def calls_for(size_bytes: int) -> int:
    """Return how many calls a block has."""
    return next((calls for limit, calls in CALLS.items() if size_bytes <= limit), 2)


def measure(plan: Plan, engines: dict[str, Engine], advance: Callable[[], None]) -> Samples:
    """Time all engines in turn; every rank returns its own times."""
    samples: Samples = {}
    for size in plan.sizes:
        tensor = torch.ones(size // 4)
        found: dict[str, list[list[float]]] = {name: [] for name in engines}
        for turn in range(plan.rounds):
            for name in random.Random(turn).sample(sorted(engines), len(engines)):
                found[name].append(_block(engines[name], tensor, calls_for(size)))
            advance()
        samples[str(size)] = found
    return samples


def _block(engine: Engine, tensor: torch.Tensor, calls: int) -> list[float]:
    tensor.fill_(1.0)
    dist.barrier()
    for _ in range(WARM_UP):
        engine(tensor)
    if tensor.numel():
        assert tensor[-1] == float(dist.get_world_size()) ** WARM_UP
    tensor.zero_()  # sums of ones would reach infinity
    times = []
    for _ in range(calls):
        began = time.perf_counter()
        engine(tensor)
        times.append(time.perf_counter() - began)
    return times


def c10d_engines() -> dict[str, Engine]:
    """gloo and Paceline, as users call them."""
    groups = {name: dist.new_group(backend=name) for name in ("gloo", "paceline")}
    return {name: _over(group) for name, group in groups.items()}


def _over(group: Any) -> Engine:
    return lambda tensor: dist.all_reduce(tensor, group=group)


def mean_over_ranks(samples: list[Samples]) -> Samples:
    """Average each call over the ranks."""
    first = samples[0]
    return {
        size: {
            name: [
                [sum(times) / len(times) for times in zip(*blocks, strict=True)]
                for blocks in zip(*(s[size][name] for s in samples), strict=True)
            ]
            for name in first[size]
        }
        for size in first
    }


def main(words: list[str]) -> None:
    """Run as one of MPI's processes."""
    from mpi4py import MPI

    plan_file, result_file = words
    plan = Plan(**json.loads(Path(plan_file).read_text()))
    world = MPI.COMM_WORLD
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{plan.store}", rank=world.rank, world_size=world.size
    )
    engines = c10d_engines()
    engines["openmpi"] = lambda tensor: world.Allreduce(MPI.IN_PLACE, tensor.numpy())
    mine = measure(plan, engines, lambda: None)
    everybody: list[Any] = [None] * world.size
    dist.all_gather_object(everybody, mine)
    if world.rank == 0:
        Path(result_file).write_text(json.dumps(mean_over_ranks(everybody)))
    dist.destroy_process_group()


def plan_json(plan: Plan) -> str:
    """Return what :func:`main` reads."""
    return json.dumps(asdict(plan))


if __name__ == "__main__":
    main(sys.argv[1:])
