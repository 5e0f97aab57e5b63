"""Ranks of a group whose shared memory is overwritten by a peer; called in a worker.

Offsets are those of ``native/group/layout.h``, as somebody would find them out who means harm.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
import threading
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from paceline.errors import CollectiveError
from paceline.native.extension import native
from paceline.shm import Call, Connection, SharedGroup, SharingRefusal, connect
from paceline.shm.attach.handshake import SLOT_BYTES
from tests.shm.jobs import one
from tests.shm.worker_pool import HEAP_BYTES, RankContext

ARRIVED, VERDICT, ROWS, ROW_BYTES, TICKETS = 64, 192, 256, 192, 64
TIMEOUT_S = 1.0
WORDS = (0, 1, 2, 3, 7, 255, 4096, 1 << 20, 1 << 31, (1 << 32) - 1, 1 << 33, (1 << 64) - 1)
COLLECTIVES = (
    ("barrier", 1),
    ("all_reduce", 50),
    ("all_reduce", 600_000),
    ("all_reduce_in_arena", 300_000),
    ("broadcast", 300_000),
    ("all_gather", 300_000),
    ("reduce_scatter", 300_000),
    ("all_to_all", 100_000),
)


@dataclass
class BadLeader:
    """The native core, for a leader whose header is not what it should be."""

    offset: int
    layout: str
    value: int

    def __getattr__(self, name: str) -> Any:
        return getattr(native, name)

    def format(self, address: int, world: int, slot_bytes: int) -> None:
        native.format(address, world, slot_bytes)
        word = struct.pack(self.layout, self.value)
        ctypes.memmove(address + self.offset, word, len(word))


def bad_header(context: RankContext, offset: int, layout: str, value: int) -> str:
    """Connect under a bad leader; return why there is no group."""
    found: Connection | SharingRefusal
    leader = BadLeader(offset, layout, value)
    with mock.patch.object(sys.modules["paceline.shm.attach.handshake"], "native", leader):
        found = connect(context.rank, context.gather, heap_bytes=HEAP_BYTES)
    return found.reason if isinstance(found, SharingRefusal) else "connected"


class Vandal:
    """Writes into the control segment and the slots of one's group."""

    def __init__(self, connection: Connection, seed: int) -> None:
        control, *arenas = connection.keep
        self._control = control.view(0, int(native.control_bytes(len(arenas))))
        self._arenas = [arena.view(0, 4 * SLOT_BYTES) for arena in arenas]
        self._random = random.Random(seed)
        self.writes = 0

    def write(self, offset: int, layout: str, value: int) -> None:
        struct.pack_into(layout, self._control, offset, value)
        self.writes += 1

    def write_anywhere(self) -> None:
        """Overwrite a word: mostly of the control segment, sometimes of a table of sizes."""
        value = self._random.choice((*WORDS, self._random.getrandbits(64)))
        if self._random.random() < 0.3:
            slots = self._random.choice(self._arenas)
            slot = self._random.randrange(4) * SLOT_BYTES
            struct.pack_into("<Q", slots, slot + 8 * self._random.randrange(4), value)
            self.writes += 1
        else:
            self.write(8 * self._random.randrange(len(self._control) // 8), "<Q", value)


def _group(context: RankContext) -> tuple[Connection, SharedGroup]:
    connection = context.connect()
    group = SharedGroup(connection, 0, 60.0)
    group.barrier().wait()
    group.timeout_s = TIMEOUT_S
    return connection, group


def _errors_after(context: RankContext, connection: Connection, group: SharedGroup) -> list[str]:
    """Two collectives, one that waits and one that finds the group broken."""
    found = []
    for _ in range(2):
        try:
            group.barrier(Call(blocking=True, timeout_s=TIMEOUT_S)).wait()
            found.append("nothing")
        except CollectiveError as error:
            found.append(f"{type(error).__name__}: {error}")
    context.gather(None)
    group.close()
    connection.close()
    return found


def bad_words(context: RankContext, words: list[tuple[int, str, int]]) -> list[str]:
    """Rank 1 overwrites words of the control segment between collectives."""
    connection, group = _group(context)
    context.gather(None)
    if context.rank == 1:
        vandal = Vandal(connection, 0)
        for offset, layout, value in words:
            vandal.write(offset, layout, value)
    context.gather(None)
    return _errors_after(context, connection, group)


def vandalised(context: RankContext, seed: int) -> dict[str, Any]:
    """Rank 1 writes anywhere, again and again, while all are in collectives."""
    torch.set_num_threads(1)
    connection, group = _group(context)
    vandal, is_over = Vandal(connection, seed), threading.Event()
    chance = random.Random(seed)

    def rage() -> None:
        while not is_over.wait(0.002):
            vandal.write_anywhere()

    thread = threading.Thread(target=rage)
    if context.rank == 1:
        thread.start()
    error, done, wrong = None, 0, 0
    while error is None and done < 40:
        name, count = chance.choice(COLLECTIVES)
        try:
            error = one(group, context, name, count)
        except AssertionError:
            wrong += 1  # numbers are not promised to who shares memory with a vandal
        done += 1
    is_over.set()
    if context.rank == 1:
        thread.join()
    context.gather(None)
    group.close()
    connection.close()
    return {"error": error, "done": done, "wrong": wrong, "writes": vandal.writes}
