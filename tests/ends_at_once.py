"""A program that ends while a thread still needs the interpreter: see test_gloo_threads.py.

    python ends_at_once.py torch | waited | later | wrapper | destroyed | group | hook FILE

torch: a gloo group, nothing of Paceline's. waited: the same, with what the wrapper asks for.
later: the same, but gloo is used by a finalizer, when the program has ended. wrapper: with a
wrapper that lives as long as the program. destroyed: the same, and the group is destroyed. group: a
Paceline group of two ranks, with a future that calls something slow. hook: the same with a future
of a scheduler.
"""

from __future__ import annotations

import os
import resource
import sys
import time
import weakref

import torch
import torch.distributed as dist

from paceline import DistributedDataParallel
from paceline.gloo_threads import wait_for_gloo_at_exit
from paceline.hooks.round_scheduler import Rounds, scheduler_of
from paceline.torch_private.groups import default_group

KEPT: list[object] = []


def hold_interpreter(seconds: float) -> None:
    """Nobody else runs Python meanwhile: see ``setswitchinterval`` below."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def reduce_and_leave() -> None:
    """Let gloo sum a tensor; when its thread wants to let go of it, this one is still at work."""
    work = dist.all_reduce(torch.ones(3), async_op=True)
    del work
    hold_interpreter(0.3)


def leave_a_callback(rank: int) -> None:
    """Let a sum be done; rank 1 then ends before what its future calls."""
    if rank == 0:
        time.sleep(0.3)  # so that rank 1 asks for a future of what is not done
    work = dist.all_reduce(torch.ones(3), async_op=True)
    KEPT.append(work.get_future().then(lambda _: time.sleep(0.5)))
    work.wait()


def one_round() -> Rounds:
    """A job for a scheduler."""
    ones = torch.ones(3)
    yield lambda group: group.allreduce([ones]).get_future()
    time.sleep(0.1)  # whoever submits it still has to say what to call then
    return ones


def main() -> None:
    case = sys.argv[1]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    other = os.fork() if case == "group" else None
    rank = 1 if other == 0 else 0
    dist.init_process_group(
        "paceline" if case == "group" else "gloo",
        init_method=f"file://{sys.argv[2]}",
        rank=rank,
        world_size=2 if case == "group" else 1,
    )
    sys.setswitchinterval(100)
    if case == "group":
        leave_a_callback(rank)
        if other:
            _, status = os.waitpid(other, 0)
            print(f"rank 1 ended with {os.waitstatus_to_exitcode(status)}")
        return
    if case == "hook":
        future = scheduler_of(default_group(), 1).submit("a sum", one_round())
        KEPT.append(future.then(lambda _: time.sleep(0.5)))
        time.sleep(0.2)
        return
    if case in ("waited", "later"):
        wait_for_gloo_at_exit()
    if case == "later":
        weakref.finalize(main, reduce_and_leave)
        return
    if case in ("wrapper", "destroyed"):
        model = DistributedDataParallel(torch.nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
        KEPT.append(model)
    reduce_and_leave()
    if case == "destroyed":
        dist.destroy_process_group()


main()
