"""A program that ends without closing its group, with collectives under way: see test_life.py.

    python leaves_open.py return | raise

Rank 1 is forked from rank 0. Rank 0 starts collectives in which rank 1 never takes part, and both
come to the end of the program as told. Prints what each has to say when its interpreter has gone.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

import torch

from paceline.native.extension import native
from paceline.shm import ASYNC, SharedGroup, connect


def gather_over(end: socket.socket, rank: int) -> Any:
    # Two streams: one that is both written and read forgets what it has read ahead.
    reader, writer = end.makefile("r"), end.makefile("w")

    def gather(value: Any) -> list[Any]:
        writer.write(json.dumps(value) + "\n")
        writer.flush()
        other = json.loads(reader.readline())
        return [value, other] if rank == 0 else [other, value]

    return gather


def main() -> None:
    ours, theirs = socket.socketpair()
    child = os.fork()
    rank = 0 if child else 1
    gather = gather_over(ours if rank == 0 else theirs, rank)
    connection = connect(rank, gather, heap_bytes=4 << 20)
    group = SharedGroup(connection, 0, 60.0)
    group.barrier().wait()
    if rank == 0:
        shared = group.arena.allocate(300_000, torch.float32)
        for tensor in (shared, torch.ones(300_000), torch.ones(4)):
            group.all_reduce(tensor, native.OP_SUM, ASYNC)
    gather("all started")
    globals()["kept"] = group  # until the interpreter takes its modules apart
    if rank == 0:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(f"rank 1 ended with {code}")
    if sys.argv[1] == "raise":
        raise ZeroDivisionError


main()
