"""What a rank does in a collective, as a list of steps of which each is atomic.

Written beside ``engine.c`` and ``sync.c``: every step here is one access to shared memory there, or
a run of accesses that nobody can tell apart. Memory is written in two steps, torn and then whole,
and read in one: whatever a longer read could see, a read at some instant of it sees as well.

Phases are known in advance, because every collective takes the same phases on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Step = tuple[Any, ...]
Location = tuple[Any, ...]

EMPTY, TORN, BAD, USERS = 0, -1, -2, -3


@dataclass(frozen=True)
class Rules:
    """The protocol as it is; a mutation changes one of these."""

    slots: int = 4
    tickets: int = 2
    puts_before_arriving: bool = True
    takes_one_phase_later: bool = True  # the results of a staged reduction
    enters_in_place: bool = True
    leaves_in_place: bool = True
    looks_at_the_verdict_on_leaving: bool = True
    counts_before_noting: bool = True
    counts_before_looking: bool = True  # for sleepers
    wakes: bool = True
    announces_before_looking: bool = True  # a sleeper, at the count
    kernel_compares: bool = True
    sleeps_with_timer: bool = True
    watches: bool = True
    any_gone_rank_is_lost: bool = True
    looks_again_after_watching: bool = True
    waiters_see_verdicts: bool = True
    resets_the_count: bool = False


class Program:
    """The steps of one rank for a script of collectives.

    Scripts are words: ``tiny`` (one phase), ``rounds`` (two rounds, as a large broadcast has),
    ``staged`` (a reduction of two rounds), ``place`` (in place).
    """

    def __init__(self, script: str, rank: int, world: int, rules: Rules) -> None:
        self.rank = rank
        self.ranks = range(world)
        self.rules = rules
        self.steps: list[Step] = []
        self.phase = 0
        for seq, kind in enumerate(script.split(), 1):
            self.steps.append(("begin",))
            getattr(self, f"_{kind}")(seq)
        self.done = len(self.steps)
        self.counted = list(self._progress("count"))
        self.noted = list(self._progress("note"))
        self.waits_for = {
            pc: step[1] for pc, step in enumerate(self.steps) if step[0] in ("asleep", "watch")
        }
        self.wakes_for = {
            pc: step[1] for pc, step in enumerate(self.steps) if step[0] in ("look", "wake")
        }

    def _progress(self, name: str) -> Iterator[int]:
        """Yield, for every place, the last phase of which this step has been done."""
        last = 0
        for step in self.steps:
            yield last
            if step[0] == name:
                last = step[1]
        yield last

    # --- collectives -----------------------------------------------------------------------------

    def _tiny(self, seq: int) -> None:
        self._open(seq, self._whole_slot(self.phase + 1))
        self._see([("in", rank, self._slot(self.phase)) for rank in self.ranks], self.phase)

    def _rounds(self, seq: int) -> None:
        self._open(seq, self._whole_slot(self.phase + 1))
        self._put_and_arrive(self._whole_slot(self.phase + 1))
        read = self.phase - 1
        self._see([("in", rank, self._slot(read)) for rank in self.ranks], read)
        self._await()
        self._see([("in", rank, self._slot(self.phase)) for rank in self.ranks], self.phase)

    def _staged(self, seq: int, rounds: int = 2) -> None:
        """As reduce_staged: reduce this round, put the next, arrive, take the round before.

        A rank does not put its own slice, but slices lie elsewhere in a shorter round: what is
        put may well lie where the result of an earlier round was.
        """
        self._open(seq, self._whole_slot(self.phase + 1))
        for turn in range(rounds + 1):
            phase = self.phase
            if turn < rounds:
                self._see([("in", rank, self._slot(phase)) for rank in self.ranks], phase)
                self._write([("result", self.rank, self._slot(phase))], phase)
                following = self._whole_slot(phase + 1) if turn + 1 < rounds else []
                self._put_and_arrive(following)
            taken = phase - 1 if self.rules.takes_one_phase_later else phase
            if turn > 0 and taken < self.phase + (turn == rounds):
                results = [("result", rank, self._slot(taken)) for rank in self.ranks]
                self._see(results, taken)
            if turn < rounds:
                self._await()

    def _place(self, seq: int) -> None:
        mine = [("copy", self.rank, part) for part in self.ranks]
        self._write(mine, 2 * seq)  # the user's values, for example a gradient
        if self.rules.enters_in_place:
            self._open(seq, [])
        self.steps.append(("begin",))
        part = [("copy", rank, self.rank) for rank in self.ranks]
        self.steps.append(("mix", part, 2 * seq))
        self.steps.append(("mixed", part, 2 * seq + 1))
        if self.rules.leaves_in_place:
            self._arrive()
            self._await()
        if self.rules.looks_at_the_verdict_on_leaving:
            self.steps.append(("begin",))
        self._see(mine, 2 * seq + 1)

    # --- pieces ----------------------------------------------------------------------------------

    def _slot(self, phase: int) -> int:
        return phase % self.rules.slots

    def _whole_slot(self, phase: int) -> list[Location]:
        slot = self._slot(phase)
        return [("in", self.rank, slot), ("result", self.rank, slot)]

    def _open(self, seq: int, places: list[Location]) -> None:
        """Write the ticket and what is put before anything is known; meet; compare tickets."""
        kept = seq % self.rules.tickets
        self._write([("ticket", self.rank, kept)], seq)
        self._put_and_arrive(places)
        self._await()
        self._see([("ticket", rank, kept) for rank in self.ranks], seq)

    def _put_and_arrive(self, places: list[Location]) -> None:
        phase = self.phase + 1
        if self.rules.puts_before_arriving:
            self._write(places, phase)
        self._arrive()
        if not self.rules.puts_before_arriving:
            self._write(places, phase)

    def _write(self, places: list[Location], value: int) -> None:
        if places:
            self.steps += [("tear", places), ("put", places, value)]

    def _see(self, places: list[Location], value: int) -> None:
        self.steps.append(("see", places, value))

    def _arrive(self) -> None:
        self.phase += 1
        phase = self.phase
        count: list[Step] = [("count", phase)]
        look: list[Step] = [("look", phase)]
        wake: list[Step] = [("wake", phase)]
        arriving = count + look + wake if self.rules.counts_before_looking else look + count + wake
        note: list[Step] = [("note", phase)]
        self.steps += arriving + note if self.rules.counts_before_noting else note + arriving

    def _await(self) -> None:
        """The order of the names is what ``Machine`` jumps by."""
        first = (
            ["announce", "value"]
            if self.rules.announces_before_looking
            else [
                "value",
                "announce",
            ]
        )
        names = ["check", "watch", "lost", "late", *first, "futex", "asleep", "leave"]
        start = len(self.steps)
        self.steps += [(name, self.phase, start, start + len(names)) for name in names]
