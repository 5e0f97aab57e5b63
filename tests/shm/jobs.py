"""What ranks do in the tests of the shared-memory group; called in a :class:`~crew.Seat`."""

from __future__ import annotations

import gc
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.errors import CollectiveError
from paceline.native.extension import native
from paceline.shm import ASYNC, BLOCKING, Pending, SharedGroup
from tests.shm.crew import Seat

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

    def reduce_lanes_in_arena(self, mine: torch.Tensor, count: int) -> Any:
        """Rank i gets the sum of slice i; slices of others stay as they are."""
        wanted, total = mine.clone(), _total(self.world, count)
        mine_from, mine_to = (
            native.cut(count, self.world, index, 4) for index in (self.rank, self.rank + 1)
        )
        wanted[mine_from:mine_to] = total[mine_from:mine_to]
        return self.group.reduce_lanes(mine, self.world), [(mine, wanted)]

    def share_lanes_in_arena(self, mine: torch.Tensor, count: int) -> Any:
        cuts = [native.cut(count, self.world, index, 4) for index in range(self.world + 1)]
        wanted = torch.cat([_values(i, count)[cuts[i] : cuts[i + 1]] for i in range(self.world)])
        return self.group.share_lanes(mine, self.world), [(mine, wanted)]


def describe(error: BaseException) -> dict[str, Any]:
    """What a test wants to know of an error."""
    names = ("rank", "host", "pid", "operation", "missing")
    facts = {name: getattr(error, name, None) for name in names}
    return {"type": type(error).__name__, "text": str(error), **facts}


def one(group: SharedGroup, seat: Seat, name: str, count: int) -> dict[str, Any] | None:
    """Do one collective, check the result; return the error and how long it took, if it failed."""
    began_s = time.monotonic()
    try:
        pending, results = Kinds(group, seat.rank, seat.world).begin(name, count)
        pending.wait()
    except CollectiveError as error:
        return {"took_s": time.monotonic() - began_s, **describe(error)}
    for found, wanted in results:
        assert torch.equal(found, wanted), f"{name} of {count}: wrong result on rank {seat.rank}"
    return None


def let_it_sleep(pid: int) -> None:
    """Come late: the rank with the fault has to wait, and falls asleep, which is where it ends."""
    until_s = time.monotonic() + 60
    while is_running(pid) and time.monotonic() < until_s:
        time.sleep(0.002)


def is_running(pid: int) -> bool:
    """Say whether a process is there and not stopped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "TZX"


def with_fault(
    seat: Seat, name: str, count: int, fault: tuple[int, int, int, int], timeout_s: float
) -> dict[str, Any]:
    """Do a collective, arm the fault on one rank, and go on until something is wrong.

    Returns:
        The error or None, how many collectives went well, and whether the fault fired.
    """
    with seat.group(timeout_s=60.0) as group:
        assert one(group, seat, name, count) is None
        group.barrier().wait()
        group.timeout_s = timeout_s
        point, nth, action, delay_ns = fault
        victim = seat.gather(os.getpid())[ROOT]
        if seat.rank == ROOT:
            group._core.arm_fault(point, nth, action, delay_ns)
        error, done = None, 0
        while error is None and done < 3:
            if seat.rank != ROOT and point == native.POINT_ASLEEP:
                let_it_sleep(victim)
            error = one(group, seat, name, count)
            done += error is None
        return {"error": error, "done": done, "fired": group._core.faults_fired()}


def delays(seat: Seat, names: tuple[str, ...], points: tuple[int, ...]) -> list[tuple[str, int]]:
    """Delay one rank at every point of every kind; return where nothing was delayed."""
    silent = []
    with seat.group() as group:
        for name in names:
            for point in points:
                fired = group._core.faults_fired()
                if seat.rank == ROOT:
                    group._core.arm_fault(point, 1, native.FAULT_DELAY, 300_000)
                elif point == native.POINT_ASLEEP:
                    time.sleep(0.002)
                for count in (TINY, STAGED):
                    assert one(group, seat, name, count) is None
                if seat.rank == ROOT and group._core.faults_fired() == fired:
                    silent.append((name, point))
    return silent


# --- the group's life ----------------------------------------------------------------------------


def caught(action: Callable[[], Any]) -> dict[str, Any] | None:
    """Do something that should fail; say how it did."""
    try:
        action()
    except BaseException as error:
        return describe(error)
    return None


def wait_for(begin: Callable[[], Pending]) -> Callable[[], None]:
    return lambda: begin().wait()


def aborted(seat: Seat, blocking: bool, by: int) -> dict[str, Any]:
    """All but rank 0 wait in a collective; one rank's other thread aborts."""
    with seat.group() as group:
        group.barrier().wait()

        def abort() -> None:
            time.sleep(0.1)
            group.abort()

        thread = threading.Thread(target=abort)
        if seat.rank == by:
            thread.start()
        call = BLOCKING if blocking else ASYNC
        tensor = torch.ones(TINY)
        error = None
        if seat.rank != 0:
            error = caught(wait_for(lambda: group.all_reduce(tensor, SUM, call)))
        elif by == 0:
            thread.join()
        if seat.rank == by:
            thread.join()
        seat.gather(None)  # nobody leaves before all have waited
        after = caught(wait_for(lambda: group.barrier()))
        return {"error": error, "after": after}


def mismatched(seat: Seat, case: str) -> dict[str, Any]:
    """Rank 1 brings something else; afterwards the group works."""
    odd = seat.rank == 1
    with seat.group() as group:
        begin: dict[str, Callable[[], Pending]] = {
            "size": lambda: group.all_reduce(torch.ones(5 if odd else 4), SUM),
            "large size": lambda: group.all_reduce(torch.ones(STAGED + odd), SUM),
            "dtype": lambda: group.all_reduce(
                torch.ones(4, dtype=torch.float64 if odd else torch.float32), SUM
            ),
            "op": lambda: group.all_reduce(torch.ones(4), native.OP_MAX if odd else SUM),
            "kind": lambda: group.barrier(ASYNC) if odd else group.all_reduce(torch.ones(4), SUM),
            "root": lambda: group.broadcast(torch.ones(4), 1 if odd else 0),
            "splits": lambda: group.all_to_all(
                [torch.ones(3) for _ in range(seat.world)],
                [torch.ones(4 if odd and to == 0 else 3) for to in range(seat.world)],
            ),
        }
        first = caught(wait_for(begin[case]))
        works = [one(group, seat, name, TINY) for name in ("all_reduce", "all_to_all", "barrier")]
        return {"error": first, "works": works}


def left_by_one(seat: Seat, blocking: bool) -> dict[str, Any] | None:
    """Rank 1 destroys its group while the others wait."""
    with seat.group() as group:
        group.barrier().wait()
        if seat.rank == 1:
            time.sleep(0.1)
            return None
        call = BLOCKING if blocking else ASYNC
        return caught(wait_for(lambda: group.all_reduce(torch.ones(TINY), SUM, call)))


def closed_under_way(seat: Seat) -> dict[str, Any] | None:
    """This rank's own other thread destroys the group in which it waits."""
    with seat.group() as group:
        group.barrier().wait()
        if seat.rank == 1:
            seat.gather(None)
            return None
        thread = threading.Timer(0.1, group.close)
        thread.start()
        found = caught(wait_for(lambda: group.all_reduce(torch.ones(TINY), SUM)))
        thread.join()
        seat.gather(None)
        return {"waited": found, "after": caught(lambda: group.barrier())}


def forked(seat: Seat) -> list[Any]:
    """Use the group in a forked child; the parent goes on."""
    with seat.group() as group:
        group.barrier().wait()
        slow = group.all_reduce(torch.ones(TINY), SUM) if seat.rank == 0 else None
        here, there = os.pipe()
        pid = os.fork()
        if pid == 0:
            actions = [
                wait_for(lambda: group.all_reduce(torch.ones(4), SUM)),
                wait_for(group.barrier),
                group.abort,
                slow.wait if slow is not None else wait_for(group.barrier),
            ]
            names = [(caught(action) or {"type": "nothing"})["type"] for action in actions]
            group.close()
            os.write(there, "\n".join(names).encode())
            os._exit(0)
        os.close(there)
        with os.fdopen(here) as stream:
            names = stream.read().split()
        os.waitpid(pid, 0)
        if slow is None:
            slow = group.all_reduce(torch.ones(TINY), SUM)
        slow.wait()
        return [names, [one(group, seat, name, STAGED) for name in ("all_reduce", "broadcast")]]


def interrupted(seat: Seat, blocking: bool) -> dict[str, Any]:
    """Rank 0 waits and gets SIGINT; the other one comes too late."""
    with seat.group() as group:
        group.barrier().wait()
        if seat.rank != 0:
            seat.gather(None)
            return {"error": caught(wait_for(lambda: group.barrier()))}
        threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGINT)).start()
        call = BLOCKING if blocking else ASYNC
        error = caught(wait_for(lambda: group.all_reduce(torch.ones(TINY), SUM, call)))
        if not blocking:
            group.abort()
        seat.gather(None)
        return {"error": error, "after": caught(wait_for(lambda: group.barrier()))}


def interrupted_behind_another(seat: Seat) -> dict[str, Any]:
    """A blocking call is queued and interrupted; its tensor must not go before it is done."""
    with seat.group() as group:
        group.barrier().wait()
        if seat.rank == 1:
            seat.gather(None)
            first = torch.ones(4)
            group.all_reduce(first, SUM).wait()
            group.all_reduce(torch.ones(STAGED), SUM).wait()
            return {"error": None}
        first = group.all_reduce(torch.ones(4), SUM)
        threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGINT)).start()
        error = caught(wait_for(lambda: group.all_reduce(torch.ones(STAGED), SUM, BLOCKING)))
        gc.collect()
        kept = len(group._in_flight)
        seat.gather(None)
        first.wait()
        group._in_flight[-1].wait()
        return {"error": error, "kept": kept}


def dropped(seat: Seat) -> None:
    """Start something that never ends, and lose every reference: no crash, nothing left."""
    group = SharedGroup(seat.connect(), 0, 20.0)
    group.barrier().wait()
    if seat.rank == 0:
        shared = group.arena.allocate(STAGED, torch.float32)
        group.all_reduce(shared, SUM)
        group.all_reduce(torch.ones(STAGED), SUM)
        del shared
    seat.gather(None)
    del group
    gc.collect()
    seat.gather(None)


def raised(seat: Seat) -> dict[str, Any] | None:
    """An exception in the middle: the group is left by the context manager, peers are told."""
    found = None
    try:
        with seat.group() as group:
            group.barrier().wait()
            group.all_reduce(torch.ones(STAGED), SUM).wait()
            if seat.rank == 0:
                raise ZeroDivisionError
            found = caught(wait_for(lambda: group.barrier()))
    except ZeroDivisionError:
        assert seat.rank == 0
    return found


def shapes(seat: Seat) -> int:
    """Sizes that no number of ranks divides, none at all, and tensors with gaps."""
    checked = 0
    with seat.group() as group:
        for count in (0, 1, 2, 3, 15, 16, 17, 31, 4095, 4097, 262_143, 262_145, 700_001):
            for name in KIND_NAMES:
                assert one(group, seat, name, count) is None, (name, count)
                checked += 1
        wide = torch.zeros(64, 48)
        view = wide.t()[3:40:2, 1:60:3]
        view.copy_(torch.arange(view.numel()).view(view.shape) + seat.rank)
        wanted = (view - seat.rank) * seat.world + sum(range(seat.world))
        rest = wide.clone()
        group.all_reduce(view, SUM).wait()
        assert torch.equal(view, wanted)
        view.zero_(), rest.t()[3:40:2, 1:60:3].zero_()
        assert torch.equal(wide, rest), "something beside the view was written to"
        outputs = [torch.zeros(6, 4).t() for _ in range(seat.world)]
        group.all_gather(outputs, torch.full((6, 4), float(seat.rank)).t()).wait()
        assert [out.unique().tolist() for out in outputs] == [[float(r)] for r in range(seat.world)]
    return checked


def impossible(seat: Seat) -> list[dict[str, Any] | None]:
    """Ask the core for what it does not have."""
    with seat.group() as group:
        tensor = torch.ones(4)
        whole = torch.ones(4, dtype=torch.int32)
        return [
            caught(lambda: group.broadcast(tensor, seat.world)),
            caught(lambda: group.all_reduce(tensor, native.OP_BAND)),
            caught(lambda: group.all_reduce(whole, native.OP_AVG)),
            caught(lambda: group.all_reduce(tensor, 77)),
        ]


def huge(seat: Seat, size: int) -> dict[str, Any]:
    """Broadcast more than 2 GiB; return how much memory this took."""
    with seat.group(timeout_s=60) as group:
        tensor = torch.empty(size, dtype=torch.uint8)
        tensor.fill_(7 if seat.rank == 1 else 0)
        marks = (0, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 31) + 12345, size - 1)
        if seat.rank == 1:
            for index, mark in enumerate(marks):
                tensor[mark] = 100 + index
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        group.broadcast(tensor, 1).wait()
        grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        found = [int(tensor[mark]) for mark in marks]
        assert found == [100 + index for index in range(len(marks))], found
        assert int(tensor[: 1 << 20].ne(7).sum()) == 1
        assert int(tensor[-(1 << 20) :].ne(7).sum()) == 2
        return {"grown_kib": grown_kib}


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
    "reduce_lanes_in_arena",
    "share_lanes_in_arena",
)


def soak(seat: Seat, collectives: int) -> list[tuple[int, int, int]]:
    """Do very many collectives; return (RSS in KiB, descriptors, threads) now and then."""
    looks = []
    with seat.group() as group:
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
                    one(group, seat, KIND_NAMES[turn // 50 % len(KIND_NAMES)], STAGED // 7) is None
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
