"""A program whose rank 1 ends in a given way while others need it; prints what they were told.

Forks its ranks, so that torch is imported once and the end of a rank is that of a real program:
what is raised here goes up to the interpreter. Run by ``test_exit_reason.py``.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first backward would, in each rank
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from paceline import DistributedDataParallel as DDP
from paceline.errors import CollectiveError

WORLD = 3
WARM = 3
"""Steps after which a wrapper talks through shared memory only."""
RAISED = "layer 7 has no input\x1b[31m \u2014 ünïcode\nsecond line"


def end_by(how: str) -> None:
    """End this process."""
    if how in ("raise", "process", "spawn", "handled"):
        raise ValueError(RAISED)
    if how == "long":
        raise ValueError("x" * 100_000)
    if how == "sys.exit":
        sys.exit(3)
    if how == "os._exit":
        os._exit(3)
    if how == "return":
        return
    os.kill(os.getpid(), signal.SIGKILL)


class Rank:
    """One rank: two wrappers, so that a late rank finds no verdict where it waits."""

    def __init__(self, rank: int, directory: Path, backend: str) -> None:
        self.rank, self.directory = rank, directory
        init = f"file://{directory}/store"
        dist.init_process_group(backend, init_method=init, rank=rank, world_size=WORLD)
        self.ddps = [DDP(nn.Linear(4, 4)) for _ in range(2)]
        for ddp in [*self.ddps] * WARM:
            ddp(torch.ones(2, 4)).sum().backward()

    def wait_in(self, which: int) -> None:
        """Run a step that rank 1 takes no part in, and write down what it raises."""
        ddp = self.ddps[which]
        try:
            ddp(torch.ones(2, 4)).sum().backward()
        except CollectiveError as error:
            told = {"type": type(error).__name__, "rank": error.rank, "text": str(error)}
            partial = self.directory / f"partial{self.rank}"
            partial.write_text(json.dumps(told))
            partial.rename(self.directory / f"told{self.rank}")
            if self.rank == 2:
                os._exit(0)  # nobody is left to be told how it ends
            raise

    def run(self, how: str) -> None:
        if self.rank == 1:
            if how == "handled":
                try:
                    end_by(how)
                finally:
                    dist.destroy_process_group()
            return end_by(how)
        if self.rank == 2:
            await_file(self.directory / "the others have ended")
        return self.wait_in(0 if self.rank == 0 else 1)


def await_file(path: Path) -> None:
    until_s = time.monotonic() + 60
    while not path.exists():
        if time.monotonic() > until_s:
            raise TimeoutError(path)
        time.sleep(0.01)


def main_of(rank: int, directory: Path, how: str, backend: str) -> None:
    """What a rank does, from its start to the end that it takes."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # tracebacks of ranks that end as they should
    Rank(rank, directory, backend).run(how)


def start(rank: int, directory: Path, how: str, backend: str) -> int:
    """Fork a rank, and return its pid."""
    if rank == 1 and how == "process":
        process = mp.get_context("fork").Process(target=main_of, args=(1, directory, how, backend))
        process.start()
        return int(process.pid)
    if rank == 1 and how == "spawn":
        arguments = (directory, how, backend)
        started = mp.start_processes(spawned, arguments, 1, join=False, start_method="fork")
        return int(started.pids()[0])
    pid = os.fork()
    if pid == 0:
        main_of(rank, directory, how, backend)
        # Not at the end of this file: the parent's part is not ours. Finalizers run as they would.
        raise Ended
    return pid


def spawned(_: int, directory: Path, how: str, backend: str) -> None:
    main_of(1, directory, how, backend)


class Ended(SystemExit):
    """Nothing is left to do in a forked rank."""


def play(how: str, backend: str) -> dict[str, Any]:
    """Let rank 1 end, and return what ranks 0 and 2 were told."""
    directory = Path(tempfile.mkdtemp())  # no context: ranks, too, leave this function
    pids = [start(rank, directory, how, backend) for rank in range(WORLD)]
    _reap(pids[0], pids[1])
    (directory / "the others have ended").touch()
    _reap(pids[2])
    told = {rank: directory / f"told{rank}" for rank in (0, 2)}
    found = {str(rank): json.loads(path.read_text()) for rank, path in told.items()}
    shutil.rmtree(directory)
    return found


def _reap(*pids: int) -> None:
    for pid in pids:
        with contextlib.suppress(ChildProcessError):  # multiprocessing has done it
            os.waitpid(pid, 0)


def main() -> None:
    parent = os.getpid()
    gc.disable()  # a rank that ends would touch, and so copy, all that it was forked with
    gc.freeze()
    found: dict[str, Any] = {}
    try:
        for case in sys.argv[1:]:
            how, _, backend = case.partition("/")
            found[case] = play(how, backend or "gloo")
    finally:
        if os.getpid() == parent:
            assert threading.active_count() == 1
            print(json.dumps(found))


if __name__ == "__main__":
    main()
