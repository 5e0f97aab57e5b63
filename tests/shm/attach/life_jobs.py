"""What ranks do in tests of how a group ends, or is misused; called by ``worker_pool.py``."""

from __future__ import annotations

import gc
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from paceline.native.extension import native
from paceline.shm import ASYNC, BLOCKING, Pending, SharedGroup
from tests.shm.jobs import KIND_NAMES, STAGED, SUM, TINY, describe, one
from tests.shm.worker_pool import RankContext


def caught(action: Callable[[], Any]) -> dict[str, Any] | None:
    """Do something that should fail; say how it did, and how long that took."""
    began_s = time.monotonic()
    try:
        action()
    except BaseException as error:
        return {"took_s": time.monotonic() - began_s, "at_s": time.monotonic(), **describe(error)}
    return None


def wait_for(begin: Callable[[], Pending]) -> Callable[[], None]:
    return lambda: begin().wait()


def aborted(context: RankContext, blocking: bool, by: int) -> dict[str, Any]:
    """All but rank 0 wait in a collective; one rank's other thread aborts."""
    with context.group() as group:
        group.barrier().wait()
        at_s: list[float] = []

        def abort() -> None:
            time.sleep(0.1)
            at_s.append(time.monotonic())
            group.abort()

        thread = threading.Thread(target=abort)
        if context.rank == by:
            thread.start()
        call = BLOCKING if blocking else ASYNC
        tensor = torch.ones(TINY)
        error = None
        if context.rank != 0:
            error = caught(wait_for(lambda: group.all_reduce(tensor, SUM, call)))
        elif by == 0:
            thread.join()
        if context.rank == by:
            thread.join()
        context.gather(None)  # nobody leaves before all have waited
        after = caught(wait_for(lambda: group.barrier()))
        return {"error": error, "after": after, "at_s": (at_s or [0.0])[0]}


def mismatched(context: RankContext, case: str) -> dict[str, Any]:
    """Rank 1 brings something else; afterwards the group works."""
    odd = context.rank == 1
    with context.group() as group:
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
                [torch.ones(3) for _ in range(context.world)],
                [torch.ones(4 if odd and to == 0 else 3) for to in range(context.world)],
            ),
        }
        first = caught(wait_for(begin[case]))
        works = [
            one(group, context, name, TINY) for name in ("all_reduce", "all_to_all", "barrier")
        ]
        return {"error": first, "works": works}


def left_by_one(context: RankContext, blocking: bool) -> dict[str, Any] | None:
    """Rank 1 destroys its group while the others wait."""
    with context.group() as group:
        group.barrier().wait()
        if context.rank == 1:
            time.sleep(0.1)
            return None
        call = BLOCKING if blocking else ASYNC
        return caught(wait_for(lambda: group.all_reduce(torch.ones(TINY), SUM, call)))


def closed_under_way(context: RankContext) -> dict[str, Any] | None:
    """This rank's own other thread destroys the group in which it waits."""
    with context.group() as group:
        group.barrier().wait()
        if context.rank == 1:
            context.gather(None)
            return None
        thread = threading.Timer(0.1, group.close)
        thread.start()
        found = caught(wait_for(lambda: group.all_reduce(torch.ones(TINY), SUM)))
        thread.join()
        context.gather(None)
        return {"waited": found, "after": caught(lambda: group.barrier())}


def forked(context: RankContext) -> list[Any]:
    """Use the group in a forked child; the parent goes on."""
    with context.group() as group:
        group.barrier().wait()
        slow = group.all_reduce(torch.ones(TINY), SUM) if context.rank == 0 else None
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
        return [names, [one(group, context, name, STAGED) for name in ("all_reduce", "broadcast")]]


def interrupted(context: RankContext, blocking: bool) -> dict[str, Any]:
    """Rank 0 waits and gets SIGINT; the other one comes too late."""
    with context.group() as group:
        group.barrier().wait()
        if context.rank != 0:
            context.gather(None)
            return {"error": caught(wait_for(lambda: group.barrier()))}
        threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGINT)).start()
        call = BLOCKING if blocking else ASYNC
        error = caught(wait_for(lambda: group.all_reduce(torch.ones(TINY), SUM, call)))
        if not blocking:
            group.abort()
        context.gather(None)
        return {"error": error, "after": caught(wait_for(lambda: group.barrier()))}


def interrupted_behind_another(context: RankContext) -> dict[str, Any]:
    """A blocking call is queued and interrupted; its tensor must not go before it is done."""
    with context.group() as group:
        group.barrier().wait()
        if context.rank == 1:
            context.gather(None)
            first = torch.ones(4)
            group.all_reduce(first, SUM).wait()
            group.all_reduce(torch.ones(STAGED), SUM).wait()
            return {"error": None}
        first = group.all_reduce(torch.ones(4), SUM)
        threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGINT)).start()
        error = caught(wait_for(lambda: group.all_reduce(torch.ones(STAGED), SUM, BLOCKING)))
        gc.collect()
        kept = len(group._in_flight)
        context.gather(None)
        first.wait()
        group._in_flight[-1].wait()
        return {"error": error, "kept": kept}


def dropped(context: RankContext) -> None:
    """Start something that never ends, and lose every reference: no crash, nothing left."""
    group = SharedGroup(context.connect(), 0, 20.0)
    group.barrier().wait()
    if context.rank == 0:
        shared = group.arena.allocate(STAGED, torch.float32)
        group.all_reduce(shared, SUM)
        group.all_reduce(torch.ones(STAGED), SUM)
        del shared
    context.gather(None)
    del group
    gc.collect()
    context.gather(None)


def raised(context: RankContext) -> dict[str, Any] | None:
    """An exception in the middle: the group is left by the context manager, peers are told."""
    found = None
    try:
        with context.group() as group:
            group.barrier().wait()
            group.all_reduce(torch.ones(STAGED), SUM).wait()
            if context.rank == 0:
                raise ZeroDivisionError
            found = caught(wait_for(lambda: group.barrier()))
    except ZeroDivisionError:
        assert context.rank == 0
    return found


def shapes(context: RankContext) -> int:
    """Sizes that no number of ranks divides, none at all, and tensors with gaps."""
    checked = 0
    with context.group() as group:
        for count in (0, 1, 2, 3, 15, 16, 17, 31, 4095, 4097, 262_143, 262_145, 700_001):
            for name in KIND_NAMES:
                assert one(group, context, name, count) is None, (name, count)
                checked += 1
        wide = torch.zeros(64, 48)
        view = wide.t()[3:40:2, 1:60:3]
        view.copy_(torch.arange(view.numel()).view(view.shape) + context.rank)
        wanted = (view - context.rank) * context.world + sum(range(context.world))
        rest = wide.clone()
        group.all_reduce(view, SUM).wait()
        assert torch.equal(view, wanted)
        view.zero_(), rest.t()[3:40:2, 1:60:3].zero_()
        assert torch.equal(wide, rest), "something beside the view was written to"
        outputs = [torch.zeros(6, 4).t() for _ in range(context.world)]
        group.all_gather(outputs, torch.full((6, 4), float(context.rank)).t()).wait()
        assert [out.unique().tolist() for out in outputs] == [
            [float(r)] for r in range(context.world)
        ]
    return checked


def impossible(context: RankContext) -> list[dict[str, Any] | None]:
    """Ask the core for what it does not have."""
    with context.group() as group:
        tensor = torch.ones(4)
        whole = torch.ones(4, dtype=torch.int32)
        return [
            caught(lambda: group.broadcast(tensor, context.world)),
            caught(lambda: group.all_reduce(tensor, native.OP_BAND)),
            caught(lambda: group.all_reduce(whole, native.OP_AVG)),
            caught(lambda: group.all_reduce(tensor, 77)),
        ]


def huge(context: RankContext, size: int) -> dict[str, Any]:
    """Broadcast more than 2 GiB; return seconds and how much memory this took."""
    with context.group(timeout_s=60) as group:
        tensor = torch.empty(size, dtype=torch.uint8)
        tensor.fill_(7 if context.rank == 1 else 0)
        marks = (0, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 31) + 12345, size - 1)
        if context.rank == 1:
            for index, mark in enumerate(marks):
                tensor[mark] = 100 + index
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began_s = time.monotonic()
        group.broadcast(tensor, 1).wait()
        took_s = time.monotonic() - began_s
        grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        found = [int(tensor[mark]) for mark in marks]
        assert found == [100 + index for index in range(len(marks))], found
        assert int(tensor[: 1 << 20].ne(7).sum()) == 1
        assert int(tensor[-(1 << 20) :].ne(7).sum()) == 2
        return {"took_s": took_s, "grown_kib": grown_kib}
