"""What ranks do in the tests of the shared-memory group; called by ``worker_pool.py``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.errors import CollectiveError
from paceline.native.extension import native
from paceline.processes import ProcessState, process_state
from paceline.shm import ASYNC, BLOCKING, Pending, SharedGroup
from tests.shm.worker_pool import RankContext

SUM = native.OP_SUM
TINY, STAGED = 100, 700_000  # float32; the second takes three slots of a megabyte
ROOT = 1
"""Of collectives that have one; also the rank that faults happen to, so that all points fire."""

Begin = Callable[[SharedGroup, torch.Tensor], Pending]


def _values(rank: int, count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32).remainder_(31).add_(rank)


def _total(world: int, count: int) -> torch.Tensor:
    return _values(0, count) * world + sum(range(world))


@dataclass
class Kinds:
    """Every kind of collective: begins it and returns what was begun and what is to come back."""

    group: SharedGroup
    rank: int
    world: int

    @property
    def root(self) -> int:
        return min(ROOT, self.world - 1)

    def begin(self, name: str, count: int) -> tuple[Pending, list[tuple[torch.Tensor, Any]]]:
        """Return the pending collective and pairs of (result, expected)."""
        mine = _values(self.rank, count)
        if name.endswith("_in_arena"):
            shared = self.group.arena.allocate(count, torch.float32)
            assert shared is not None
            mine = shared.copy_(mine)
        return getattr(self, name)(mine, count)  # type: ignore[no-any-return]

    def barrier(self, mine: torch.Tensor, count: int) -> Any:
        return self.group.barrier(BLOCKING), []

    def all_reduce(self, mine: torch.Tensor, count: int) -> Any:
        return self.group.all_reduce(mine, SUM), [(mine, _total(self.world, count))]

    all_reduce_in_arena = all_reduce

    def reduce(self, mine: torch.Tensor, count: int) -> Any:
        wanted = _total(self.world, count) if self.rank == self.root else mine.clone()
        return self.group.reduce(mine, SUM, self.root), [(mine, wanted)]

    def broadcast(self, mine: torch.Tensor, count: int) -> Any:
        return self.group.broadcast(mine, self.root), [(mine, _values(self.root, count))]

    def all_gather(self, mine: torch.Tensor, count: int) -> Any:
        outputs = [torch.empty(count) for _ in range(self.world)]
        wanted = [_values(rank, count) for rank in range(self.world)]
        return self.group.all_gather(outputs, mine), list(zip(outputs, wanted, strict=True))

    def gather(self, mine: torch.Tensor, count: int) -> Any:
        ranks = range(self.world if self.rank == self.root else 0)
        outputs = [torch.empty(count) for _ in ranks]
        wanted = [_values(rank, count) for rank in ranks]
        return self.group.gather(outputs, mine, self.root), list(zip(outputs, wanted, strict=True))

    def scatter(self, mine: torch.Tensor, count: int) -> Any:
        ranks = range(self.world if self.rank == self.root else 0)
        inputs = [_values(self.root + 10 * rank, count) for rank in ranks]
        pending = self.group.scatter(mine, inputs, self.root)
        return pending, [(mine, _values(self.root + 10 * self.rank, count))]

    def reduce_scatter(self, mine: torch.Tensor, count: int) -> Any:
        inputs = [mine + 10 * rank for rank in range(self.world)]
        output = torch.empty(count)
        wanted = _total(self.world, count) + 10 * self.rank * self.world
        return self.group.reduce_scatter(output, inputs, SUM), [(output, wanted)]

    def all_to_all(self, mine: torch.Tensor, count: int) -> Any:
        inputs = [mine[: count // (self.rank + to + 1)] for to in range(self.world)]
        sizes = [count // (self.rank + source + 1) for source in range(self.world)]
        outputs = [torch.empty(size) for size in sizes]
        wanted = [_values(source, size) for source, size in enumerate(sizes)]
        return self.group.all_to_all(outputs, inputs), list(zip(outputs, wanted, strict=True))

    def reduce_to_leaders_in_arena(self, mine: torch.Tensor, count: int) -> Any:
        """Rank i gets the sum of slice i; slices of others stay as they are."""
        wanted, total = mine.clone(), _total(self.world, count)
        mine_from, mine_to = (
            native.cut(count, self.world, index, 4) for index in (self.rank, self.rank + 1)
        )
        wanted[mine_from:mine_to] = total[mine_from:mine_to]
        return self.group.reduce_to_leaders(mine, self.world), [(mine, wanted)]

    def copy_from_leaders_in_arena(self, mine: torch.Tensor, count: int) -> Any:
        cuts = [native.cut(count, self.world, index, 4) for index in range(self.world + 1)]
        wanted = torch.cat([_values(i, count)[cuts[i] : cuts[i + 1]] for i in range(self.world)])
        return self.group.copy_from_leaders(mine, self.world), [(mine, wanted)]


def describe(error: BaseException) -> dict[str, Any]:
    """What a test wants to know of an error."""
    names = ("rank", "host", "pid", "operation", "missing")
    facts = {name: getattr(error, name, None) for name in names}
    return {"type": type(error).__name__, "text": str(error), **facts}


def one(group: SharedGroup, context: RankContext, name: str, count: int) -> dict[str, Any] | None:
    """Do one collective, check the result; return the error and how long it took, if it failed."""
    began_s = time.monotonic()
    try:
        pending, results = Kinds(group, context.rank, context.world).begin(name, count)
        pending.wait()
    except CollectiveError as error:
        return {"took_s": time.monotonic() - began_s, **describe(error)}
    for found, wanted in results:
        assert torch.equal(found, wanted), f"{name} of {count}: wrong result on rank {context.rank}"
    return None


def let_it_sleep(pid: int) -> None:
    """Come late: the rank with the fault has to wait, and falls asleep, which is where it ends."""
    until_s = time.monotonic() + 60
    while process_state(pid) is ProcessState.ALIVE and time.monotonic() < until_s:
        time.sleep(0.002)


def with_fault(
    context: RankContext, name: str, count: int, fault: tuple[int, int, int, int], timeout_s: float
) -> dict[str, Any]:
    """Do a collective, set the fault on one rank, and go on until something is wrong.

    Returns:
        The error or None, how many collectives went well, and whether the fault fired.
    """
    with context.group(timeout_s=60.0) as group:
        assert one(group, context, name, count) is None
        group.barrier().wait()
        group.timeout_s = timeout_s
        point, nth, action, delay_ns = fault
        victim = context.gather(os.getpid())[ROOT]
        if context.rank == ROOT:
            group._core.arm_fault(point, nth, action, delay_ns)
        error, done = None, 0
        while error is None and done < 3:
            if context.rank != ROOT and point == native.POINT_ASLEEP:
                let_it_sleep(victim)
            error = one(group, context, name, count)
            done += error is None
        return {"error": error, "done": done, "fired": group._core.faults_fired()}


def delays(
    context: RankContext, names: tuple[str, ...], points: tuple[int, ...]
) -> list[tuple[str, int]]:
    """Delay one rank at every point of every kind; return where nothing was delayed."""
    silent = []
    with context.group() as group:
        for name in names:
            for point in points:
                fired = group._core.faults_fired()
                if context.rank == ROOT:
                    group._core.arm_fault(point, 1, native.FAULT_DELAY, 300_000)
                elif point == native.POINT_ASLEEP:
                    time.sleep(0.002)
                for count in (TINY, STAGED):
                    assert one(group, context, name, count) is None
                if context.rank == ROOT and group._core.faults_fired() == fired:
                    silent.append((name, point))
    return silent


KIND_NAMES = (
    "barrier",
    "all_reduce",
    "all_reduce_in_arena",
    "reduce",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "reduce_to_leaders_in_arena",
    "copy_from_leaders_in_arena",
)


def soak(context: RankContext, collectives: int) -> list[tuple[int, int, int]]:
    """Do very many collectives; return (RSS in KiB, descriptors, threads) now and then."""
    looks = []
    with context.group() as group:
        kept = group.arena.allocate(5000, torch.float32)
        tensors = [torch.ones(64), torch.ones(5000), kept]
        for turn in range(collectives // 5):
            blocking = BLOCKING if turn % 2 else ASYNC
            pending = [group.all_reduce(tensor.fill_(1), SUM, blocking) for tensor in tensors]
            pending.append(group.broadcast(tensors[0], 0))
            pending.append(group.barrier())
            for each in pending if turn % 3 else pending[-1:]:
                each.wait()
            if turn % 50 == 0:
                assert (
                    one(group, context, KIND_NAMES[turn // 50 % len(KIND_NAMES)], STAGED // 7)
                    is None
                )
                scratch = group.arena.allocate(100_000, torch.float32)
                assert scratch is not None
                del scratch
            if turn % (collectives // 50) == 0:
                status = Path("/proc/self/status").read_text()
                rss_kib = int(status.partition("VmRSS:")[2].split()[0])
                tasks = len(os.listdir("/proc/self/task"))
                looks.append((rss_kib, len(os.listdir("/proc/self/fd")), tasks))
    return looks
