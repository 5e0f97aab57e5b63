"""What the ranks of ``paceline bench allreduce`` do, and how they are started.

gloo, Paceline and DeepSpeed are engines in one set of ranks. An MPI wants to start its processes
itself, and two of them do not fit into one process: each has a rank set of its own, started by its
launcher as ``python -m paceline.cli.bench.allreduce_ranks``. All sets meet in one gloo group and
take turns ([Note: interleaving] in :mod:`~paceline.cli.bench.harness.interleave`).
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist

import paceline  # noqa: F401  # registers the backend
from paceline.cli.bench.allreduce_contenders import DEEPSPEED, GLOO, MPIS, Chosen, search_path
from paceline.cli.bench.harness.comparison import Comparison
from paceline.cli.bench.harness.interleave import take_turns
from paceline.cli.bench.harness.progress import RoundBar
from paceline.cli.bench.harness.rank_sets import RankSets
from paceline.errors import ConfigurationError
from paceline.printable import size_text
from paceline.testing import run_ranks

Engine = Callable[[torch.Tensor], Any]
Times = dict[str, dict[str, list[list[float]]]]
"""By size (as text), then by contender: the milliseconds of each call, by round."""

CALLS = {1 << 10: 200, 1 << 17: 100, 1 << 21: 30, 1 << 26: 4}
"""Calls in a turn, for tensors up to so many bytes; 2 for larger ones."""
WARM_UP = 3
MEETING_S = 120.0
IN_PROCESS = "c10d"


@dataclass(frozen=True)
class AllreducePlan:
    """What to measure.

    Attributes:
        ranks: In each rank set.
        sizes: Bytes of the tensors.
        rounds: How often each contender has its turn.
        in_process: Contenders of the first rank set.
        mpis: The names of further rank sets.
        store: A file for all of them to meet at.
    """

    ranks: int
    sizes: list[int]
    rounds: int
    in_process: list[str]
    mpis: list[str]
    store: str


def measure(
    ranks: int, sizes: Sequence[int], rounds: int, chosen: Chosen, timeout_s: float
) -> list[Comparison]:
    """Run all rank sets; return a comparison for each size."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as directory:
        store = str(Path(directory, "store"))
        plan = AllreducePlan(
            ranks, list(sizes), rounds, chosen.in_process, list(chosen.mpis), store
        )
        with contextlib.ExitStack() as stack:
            for name, launcher in chosen.mpis.items():
                stack.enter_context(_under_mpi(plan, name, launcher, Path(directory)))
            environ = stack.enter_context(_names_for_deepspeed())
            times = run_ranks(ranks, run_rank, plan, init=False, timeout_s=timeout_s, env=environ)
    names = [*chosen.in_process, *chosen.mpis]
    return [
        Comparison(
            f"{size_text(size)}, {ranks} ranks", GLOO, {n: times[0][str(size)][n] for n in names}
        )
        for size in sizes
    ]


@contextlib.contextmanager
def _names_for_deepspeed() -> Iterator[dict[str, str]]:
    """Variables that its shared memory is named by; it leaves the files behind, we do not."""
    try:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(os.getpid())}
        yield address | {"PATH": search_path()}  # of ninja
    finally:
        for file in Path("/dev/shm").glob(f"deepspeed*_127.0.0.1_{os.getpid()}_*"):
            file.unlink(missing_ok=True)


@contextlib.contextmanager
def _under_mpi(plan: AllreducePlan, name: str, launcher: str, directory: Path) -> Iterator[None]:
    """Run a rank set under its MPI; end it, however this is left."""
    mpi, log = MPIS[name], directory / f"{name}.log"
    program = [sys.executable, "-m", "paceline.cli.bench.allreduce_ranks"]
    words = [*mpi.command(launcher, plan.ranks), *program, name, json.dumps(asdict(plan))]
    with (
        log.open("w") as output,
        subprocess.Popen(
            words,
            env=mpi.environ(launcher),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a terminal's Ctrl-C is for us: we end it in order
        ) as process,
    ):
        try:
            yield
            code = process.wait(MEETING_S)
        except BaseException:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10.0)
            process.kill()
            raise
    if code:
        raise ConfigurationError(f"{name} ended with code {code}: {log.read_text()[-1000:]}")


def run_rank(plan: AllreducePlan) -> Times:
    """Be a rank of the set that gloo, Paceline and DeepSpeed share."""
    rank = int(os.environ["RANK"])
    return _take_part(plan, rank, lambda sets: _engines(plan, sets))


def _take_part(
    plan: AllreducePlan, rank: int, engines_of: Callable[[RankSets], dict[str, Engine]]
) -> Times:
    """Meet all sets, measure, and return everybody's times, averaged over the ranks of a set."""
    torch.set_num_threads(1)
    names = [IN_PROCESS, *plan.mpis]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{plan.store}",
        rank=rank,
        world_size=plan.ranks * len(names),
        timeout=datetime.timedelta(seconds=MEETING_S),
    )
    try:
        sets = RankSets(plan.ranks, names)
        mine = _run(plan, sets, engines_of(sets))
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, mine)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return _mean_over_ranks(everybody)


def _run(plan: AllreducePlan, sets: RankSets, engines: dict[str, Engine]) -> Times:
    found: Times = {}
    for size in plan.sizes:
        tensor = torch.ones(size // 4)
        title = f"{size_text(size)}, {plan.ranks} ranks"

        def turn(name: str, tensor: torch.Tensor = tensor, size: int = size) -> list[float]:
            owner = name if name in plan.mpis else IN_PROCESS
            times = sets.on_turn(owner, lambda: _block(engines[name], tensor, _calls(size)))
            return times or []

        bar = RoundBar(title, plan.rounds, is_shown=dist.get_rank() == 0)
        times = take_turns([*plan.in_process, *plan.mpis], bar, turn)
        found[str(size)] = {name: times[name] for name in engines}
    return found


def _calls(size_bytes: int) -> int:
    return next((calls for limit, calls in CALLS.items() if size_bytes <= limit), 2)


def _block(engine: Engine, tensor: torch.Tensor, calls: int) -> list[float]:
    tensor.fill_(1.0)
    for _ in range(WARM_UP):
        engine(tensor)
    if tensor[-1] != tensor[0] or tensor[0] <= 1.0:
        raise AssertionError(f"the sum is wrong: {tensor[0]}, {tensor[-1]}")
    tensor.zero_()  # sums of ones would reach infinity
    times = []
    for _ in range(calls):
        began = time.perf_counter()
        engine(tensor)
        times.append((time.perf_counter() - began) * 1e3)
    return times


def _engines(plan: AllreducePlan, sets: RankSets) -> dict[str, Engine]:
    """As users call them."""
    ranks = dist.get_process_group_ranks(sets.group)

    def over(backend: str) -> Engine:
        group = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
        return lambda tensor: dist.all_reduce(tensor, group=group)

    return {n: _deepspeed(sets) if n == DEEPSPEED else over(n) for n in plan.in_process}


def _deepspeed(sets: RankSets) -> Engine:
    """DeepSpeed's shared-memory all-reduce; it was built when contenders were looked for."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["LOCAL_SIZE"] = os.environ["WORLD_SIZE"]
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    operation = ShareMemCommBuilder().load(verbose=False)
    operation.initialize(int(os.environ["WORLD_SIZE"]), sets.rank)
    found: Engine = torch.ops.deepspeed.inference_all_reduce_
    return found


def _mean_over_ranks(everybody: Sequence[Times]) -> Times:
    """Average each call over the ranks of the set that has this contender."""
    found: Times = {size: {} for size in everybody[0]}
    for size, by_name in found.items():
        for name in dict.fromkeys(name for times in everybody for name in times[size]):
            per_rank = [times[size][name] for times in everybody if name in times[size]]
            by_name[name] = [
                [mean(calls) for calls in zip(*turns, strict=True)]
                for turns in zip(*per_rank, strict=True)
            ]
    return found


def main(words: Sequence[str]) -> None:
    """Be a rank of an MPI."""
    from mpi4py import MPI

    name, plan_json = words
    plan, world = AllreducePlan(**json.loads(plan_json)), MPI.COMM_WORLD
    rank = plan.ranks * (1 + plan.mpis.index(name)) + world.rank
    _take_part(plan, rank, lambda sets: {name: lambda t: world.Allreduce(MPI.IN_PLACE, t.numpy())})


if __name__ == "__main__":
    main(sys.argv[1:])
