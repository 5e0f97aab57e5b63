"""Thousands of groups that lose a rank: processes that hold the native core and nothing else.

    python bare.py NATIVE ROUNDS SEED

A process with torch takes long to fork; this one has only the extension module, so that a round
takes milliseconds. Every round is a fresh group of two or three processes and seven random
collectives, in one of which one rank is killed, stopped (and continued when the others have given
up) or delayed, at a random labelled point. All data that comes back is checked. The last line is
JSON: what happened how often, and everything that was wrong.
"""

from __future__ import annotations

import array
import collections
import ctypes
import importlib.machinery
import importlib.util
import json
import mmap
import os
import random
import signal
import struct
import sys
import time
from dataclasses import dataclass, field
from typing import Any

SLOT_BYTES = 4096
HEAP_BYTES = 32768
SIZES = (0, 5, 1000, 1024, 5000)  # int32: nothing, tiny, up to five slots
COLLECTIVES = 7
LANES = 12  # groups at once: most of a round is waiting
STOP_DEADLINE_S = 0.3
DEADLINE_S = 60.0
LOST_WITHIN_S = 0.5
RECORD = struct.Struct("6q")  # status, end, about, failed at, took ns, faults fired


def load_native(path: str) -> Any:
    loader = importlib.machinery.ExtensionFileLoader("_native", path)
    spec = importlib.util.spec_from_loader("_native", loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


class Memory:
    """Shared with children by fork: a control block, arenas, records, process ids."""

    def __init__(self, native: Any, world: int) -> None:
        self.native = native
        self.world = world
        self.arena_bytes = native.SLOTS * SLOT_BYTES + HEAP_BYTES
        self._control = mmap.mmap(-1, 4096)
        self._arenas = [mmap.mmap(-1, self.arena_bytes) for _ in range(world)]
        self.notes = mmap.mmap(-1, 4096)
        self.views = [memoryview(arena) for arena in self._arenas]

    def clear(self) -> None:
        self._control[:] = bytes(4096)
        self.notes[:] = bytes(4096)
        self.native.format(_address(self._control), self.world, SLOT_BYTES)

    def core(self, rank: int, pidfds: list[int]) -> Any:
        return self.native.Core(
            control=_address(self._control),
            rank=rank,
            world=self.world,
            arenas=[(_address(arena), self.arena_bytes) for arena in self._arenas],
            pidfds=pidfds,
            stage_offset=0,
            spin_ns=0,
            yields=2,
        )

    def heap(self, rank: int) -> memoryview:
        return self.views[rank][self.native.SLOTS * SLOT_BYTES :]


def _address(buffer: Any) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


@dataclass
class Fault:
    action: str
    point: int
    nth: int
    victim: int
    at: int  # which collective


@dataclass
class Round:
    """One group, as the parent sees it."""

    number: int
    memory: Memory
    fault: Fault
    pids: list[int] = field(default_factory=list)
    ended: dict[int, int] = field(default_factory=dict)
    stopped: bool = False


# --- in a rank -----------------------------------------------------------------------------------


def value_of(rank: int, step: int, index: int) -> int:
    return rank * 1000 + step * 7 + index % 13


def repeated(pattern: list[int], count: int) -> array.array[int]:
    return (array.array("i", pattern) * (count // 13 + 1))[:count]


class Rank:
    """Runs the collectives of a round and notes what came of them."""

    def __init__(self, a_round: Round, rank: int) -> None:
        self.round = a_round
        self.rank = rank
        self.memory = a_round.memory
        self.native = a_round.memory.native
        self.world = a_round.memory.world
        self.draw = random.Random(a_round.number)  # the same on every rank
        self.own = random.Random(a_round.number * 31 + rank)
        self.step = 0

    def live(self, gate: int) -> None:
        os.read(gate, 1)
        pids = struct.unpack_from(f"{self.world}q", self.memory.notes, 2048)
        pidfds = [-1 if r == self.rank else os.pidfd_open(pid) for r, pid in enumerate(pids)]
        core = self.memory.core(self.rank, pidfds)
        status, failed_at, took_ns = 0, -1, 0
        for step in range(COLLECTIVES):
            self.step = step
            began_ns = time.monotonic_ns()
            status = self._one(core, step)
            took_ns = time.monotonic_ns() - began_ns
            if status != self.native.STATUS_OK:
                failed_at = step
                break
        end, _, about = core.verdict()
        record = (status, end, about, failed_at, took_ns, core.faults_fired())
        RECORD.pack_into(self.memory.notes, self.rank * RECORD.size, *record)
        core.close()

    def _one(self, core: Any, step: int) -> int:
        fault = self.round.fault
        kind, count = self.draw.choice(KINDS), self.draw.choice(SIZES)
        in_arena = self.draw.random() < 0.5
        if fault.at == step and fault.victim == self.rank:
            action = getattr(self.native, f"FAULT_{fault.action}")
            core.arm_fault(fault.point, fault.nth, action, self.own.randrange(2_000_000))
        elif fault.at + 2 == step and fault.victim == self.rank:
            core.arm_fault(0, 1, 0, 0)  # what comes now is there to be told
        elif fault.at == step and fault.victim != self.rank:
            time.sleep(self.own.choice((0, 0, 0.003)))  # so that the victim sleeps, sometimes
        work = getattr(self, f"_{kind}")
        return int(work(core, step, count, in_arena))

    def _begin(
        self, core: Any, name: str, count: int, inputs: tuple, outputs: tuple, offset: int, op: int
    ) -> int:
        kind = getattr(self.native, f"KIND_{name}")
        is_time = self.round.fault.action == "STOP" and self.step >= self.round.fault.at
        deadline_s = STOP_DEADLINE_S if is_time else DEADLINE_S
        begin = core.run if self.own.random() < 0.5 else core.start
        arguments = (kind, self.native.DTYPE_I32, op, 0, count, offset, inputs, outputs, ())
        operation = begin(*arguments, deadline_s)
        status = operation.status()
        return int(status if status != self.native.STATUS_PENDING else operation.wait(-1.0))

    def _buffer(self, count: int, step: int, in_arena: bool) -> tuple[Any, int, int]:
        """Return an array, its address, and where it lies in the arena."""
        offset = (1 << 64) - 1
        buffer: Any = bytearray(count * 4 + 4)
        if in_arena:
            offset = self.native.SLOTS * SLOT_BYTES
            buffer = self.memory.heap(self.rank)[: count * 4 + 4]
        values = memoryview(buffer).cast("i")
        values[:count] = repeated([value_of(self.rank, step, i) for i in range(13)], count)
        return values, _address(buffer), offset

    def _barrier(self, core: Any, step: int, count: int, in_arena: bool) -> int:
        return self._begin(core, "BARRIER", 0, (), (), (1 << 64) - 1, 0)

    def _all_reduce(self, core: Any, step: int, count: int, in_arena: bool) -> int:
        values, address, offset = self._buffer(count, step, in_arena)
        op = self.native.OP_SUM
        status = self._begin(core, "ALL_REDUCE", count, (address,), (address,), offset, op)
        ranks = range(self.world)
        wanted = [sum(value_of(r, step, i) for r in ranks) for i in range(13)]
        return self._judge(status, values, count, wanted)

    def _broadcast(self, core: Any, step: int, count: int, in_arena: bool) -> int:
        values, address, _ = self._buffer(count, step, False)
        none = (1 << 64) - 1
        status = self._begin(core, "BROADCAST", count, (address,), (address,), none, 0)
        return self._judge(status, values, count, [value_of(0, step, i) for i in range(13)])

    def _all_gather(self, core: Any, step: int, count: int, in_arena: bool) -> int:
        kept, address, _ = self._buffer(count, step, False)
        outputs = [bytearray(kept.nbytes) for _ in range(self.world)]
        addresses = tuple(_address(output) for output in outputs)
        none = (1 << 64) - 1
        status = self._begin(core, "ALL_GATHER", count, (address,), addresses, none, 0)
        for rank, output in enumerate(outputs):
            wanted = [value_of(rank, step, i) for i in range(13)]
            status = self._judge(status, memoryview(output).cast("i"), count, wanted)
        return status

    def _judge(self, status: int, values: memoryview, count: int, wanted: list[int]) -> int:
        if status != self.native.STATUS_OK:
            return status
        return status if values[:count] == memoryview(repeated(wanted, count)) else 99


KINDS = ("barrier", "all_reduce", "all_reduce", "all_reduce", "broadcast", "all_gather")


# --- in the parent -------------------------------------------------------------------------------


class Parent:
    """Starts rounds, follows the processes, judges what they noted."""

    def __init__(self, native: Any, rounds: int, seed: int) -> None:
        self.native = native
        self.rounds = rounds
        self.draw = random.Random(seed)
        self.points = [v for n, v in sorted(vars(native).items()) if n.startswith("POINT_")]
        self.fired: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self.slowest_ns = self.late = 0
        self._of_pid: dict[int, Round] = {}

    def run(self) -> dict[str, Any]:
        free = [Memory(self.native, 2 + lane % 2) for lane in range(LANES)]
        begun = 0
        while begun < self.rounds or self._of_pid:
            while free and begun < self.rounds:
                self._start(begun, free.pop())
                begun += 1
            done = self._follow(*os.waitpid(-1, os.WUNTRACED))
            if done is not None:
                self._judge(done)
                free.append(done.memory)
        return {
            "fired": self.fired,
            "wrong": self.wrong[:5],
            "slowest_s": self.slowest_ns / 1e9,
            "late": self.late,
        }

    def _start(self, number: int, memory: Memory) -> None:
        memory.clear()
        action = self.draw.choice(("KILL", "KILL", "STOP", "DELAY"))
        fault = Fault(
            action,
            self.draw.choice(self.points),
            nth=self.draw.choice((1, 1, 2)),
            victim=self.draw.randrange(memory.world),
            at=1 + self.draw.randrange(3),  # in the first, all open descriptors of all
        )
        a_round = Round(number, memory, fault)
        gate, opener = os.pipe()
        for rank in range(memory.world):
            pid = os.fork()
            if pid == 0:
                self._become(a_round, rank, gate)
            a_round.pids.append(pid)
            self._of_pid[pid] = a_round
        struct.pack_into(f"{memory.world}q", memory.notes, 2048, *a_round.pids)
        os.write(opener, b"." * memory.world)
        os.close(gate)
        os.close(opener)

    def _become(self, a_round: Round, rank: int, gate: int) -> None:
        code = 1
        try:
            signal.alarm(90)
            Rank(a_round, rank).live(gate)
            code = 0
        finally:
            os._exit(code)

    def _follow(self, pid: int, status: int) -> Round | None:
        a_round = self._of_pid[pid]
        if os.WIFSTOPPED(status):
            a_round.stopped = True
        else:
            a_round.ended[a_round.pids.index(pid)] = os.waitstatus_to_exitcode(status)
            del self._of_pid[pid]
        others = a_round.memory.world - 1
        if a_round.stopped and len(a_round.ended) == others:
            os.kill(a_round.pids[a_round.fault.victim], signal.SIGCONT)
        return a_round if len(a_round.ended) > others else None

    # --- judging ---------------------------------------------------------------------------------

    def _judge(self, a_round: Round) -> None:
        fault, memory = a_round.fault, a_round.memory
        records = [RECORD.unpack_from(memory.notes, r * RECORD.size) for r in range(memory.world)]
        victim = records[fault.victim]
        has_fired = victim[5] > 0 or a_round.ended[fault.victim] == -signal.SIGKILL
        problem = ""
        try:
            name = fault.action if has_fired else "DELAY"
            getattr(self, f"_judge_{name}")(a_round, records)
        except AssertionError as error:
            problem = str(error) or "?"
        if problem:
            self.wrong.append(f"{problem}: {fault} {records} {a_round.ended}")
        if has_fired:
            self.fired[f"{fault.action} {fault.point}"] += 1

    def _judge_DELAY(self, a_round: Round, records: list[tuple]) -> None:
        assert set(a_round.ended.values()) == {0}, "a rank did not end well"
        busy = a_round.fault.action == "STOP" and records[0][1] == self.native.END_TIMEOUT
        right = {record[0] for record in records} == {self.native.STATUS_OK}
        assert right or busy, "not all are right"  # nobody was stopped, but somebody was slow

    def _judge_KILL(self, a_round: Round, records: list[tuple]) -> None:
        for rank, (status, end, about, failed_at, took_ns, _) in enumerate(records):
            if rank == a_round.fault.victim:
                assert a_round.ended[rank] == -signal.SIGKILL, "the victim lives"
                continue
            assert a_round.ended[rank] == 0, f"rank {rank} did not end well"
            # A slow rank may hear of it in the collective that the victim has just ended.
            assert failed_at >= max(a_round.fault.at - 1, 0), f"rank {rank} was told nothing"
            assert status == self.native.STATUS_BROKEN, f"rank {rank}"
            found = (end, about)
            assert found == (self.native.END_LOST, a_round.fault.victim), f"rank {rank}: {found}"
            self.slowest_ns = max(self.slowest_ns, took_ns)
            self.late += took_ns > LOST_WITHIN_S * 1e9

    def _judge_STOP(self, a_round: Round, records: list[tuple]) -> None:
        assert a_round.stopped, "the victim was not stopped"
        for rank, (status, end, about, _, took_ns, _) in enumerate(records):
            assert a_round.ended[rank] == 0, f"rank {rank} did not end well"
            assert status == self.native.STATUS_BROKEN, f"rank {rank}: status {status}"
            assert end == self.native.END_TIMEOUT, f"rank {rank}: {end}"
            assert about == records[0][2], "ranks tell different stories"
            # On a busy machine, another rank may be late as well and be named first.
            self.late += about != a_round.fault.victim
            if rank != a_round.fault.victim:
                self.late += took_ns > (STOP_DEADLINE_S + LOST_WITHIN_S) * 1e9


def main() -> None:
    path, rounds, seed = sys.argv[1:]
    print(json.dumps(Parent(load_native(path), int(rounds), int(seed)).run()))


if __name__ == "__main__":
    main()
