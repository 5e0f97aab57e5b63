"""A program that forks a child which ends as programs do: see test_forks.py.

    python forks_and_exits.py FILE

The child goes through ``atexit``, finalizers and the end of the interpreter, with groups and
wrappers of its parent. The parent prints how the child ended, and whether its own gradients are the
same.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from paceline import DistributedDataParallel

DEADLINE_S = 60.0


def make_wrapper(group: dist.ProcessGroup | None) -> DistributedDataParallel:
    """With gradients in shared memory."""
    module = torch.nn.Linear(100, 100)
    ddp = DistributedDataParallel(module, process_group=group, transport="shm")
    ddp(torch.ones(1, 100)).sum().backward()
    return ddp


def gradients(wrappers: list[DistributedDataParallel]) -> list[torch.Tensor]:
    return [p.grad for ddp in wrappers for p in ddp.parameters() if p.grad is not None]


def main() -> None:
    dist.init_process_group("paceline", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
    wrappers = [make_wrapper(None), make_wrapper(dist.new_group(backend="gloo"))]
    before = [gradient.clone() for gradient in gradients(wrappers)]
    pid = os.fork()
    if pid == 0:
        sys.exit(5)
    until_s = time.monotonic() + DEADLINE_S
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < until_s:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(pid, signal.SIGKILL)
        ended = os.waitpid(pid, 0)
    after = gradients(wrappers)
    same = all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    dist.all_reduce(torch.ones(3))
    print(f"the child ended with {os.waitstatus_to_exitcode(ended[1])}, same: {same}")


main()
