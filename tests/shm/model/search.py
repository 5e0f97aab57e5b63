"""Visits every state that can be reached, and tells the shortest way to a bad one."""

from __future__ import annotations

from array import array
from collections import deque

from tests.shm.model.machine import (
    ABORT,
    DEADLINE,
    DEATH,
    REUSE,
    Happenings,
    Machine,
    State,
    ViolationError,
)
from tests.shm.model.programs import Rules

QUIET = Happenings()
# What a rank must not need in order to come to its end.
OUTSIDE = (DEATH, DEADLINE, ABORT, REUSE)


class Search:
    """All reachable states of a machine, breadth first."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.states: list[State] = []
        self._came_from: list[tuple[int, str, int]] = []
        self._sources, self._targets = array("l"), array("l")
        self._ends: list[int] = []

    def run(self) -> int:
        """Check every state, and that every state leads to an end; return how many there are."""
        start = self.machine.start()
        numbers = {start: 0}
        self.states, self._came_from = [start], [(-1, "", 0)]
        at = 0
        while at < len(self.states):
            self._visit(at, numbers)
            at += 1
        self._check_that_all_end()
        return len(self.states)

    def _visit(self, at: int, numbers: dict[State, int]) -> None:
        state = self.states[at]
        try:
            if self.machine.is_over(state):
                self._ends.append(at)
                self.machine.check_end(state)
            following = list(self.machine.successors(state))
        except ViolationError as violation:
            raise self._told(violation, at) from None
        for what, rank, after in following:
            number = numbers.setdefault(after, len(self.states))
            if number == len(self.states):
                self.states.append(after)
                self._came_from.append((at, what, rank))
                try:
                    self.machine.check(after)
                except ViolationError as violation:
                    raise self._told(violation, number) from None
            if what not in OUTSIDE:
                self._sources.append(at)
                self._targets.append(number)

    def _check_that_all_end(self) -> None:
        """From every state, the steps of the ranks alone can lead to an end."""
        before: list[list[int]] = [[] for _ in self.states]
        for source, target in zip(self._sources, self._targets, strict=True):
            before[target].append(source)
        ends = bytearray(len(self.states))
        queue = deque(self._ends)
        for end in self._ends:
            ends[end] = 1
        while queue:
            for source in before[queue.popleft()]:
                if not ends[source]:
                    ends[source] = 1
                    queue.append(source)
        stuck = ends.find(0)
        if stuck >= 0:
            raise self._told(ViolationError("some rank waits for ever"), stuck)

    def _told(self, violation: ViolationError, at: int) -> ViolationError:
        path = []
        last = at
        while at > 0:
            at, what, rank = self._came_from[at]
            path.append(f"{rank}:{what}")
        way = " ".join(reversed(path))
        return ViolationError(f"{violation}\n  after {way}\n  in {self.states[last]}")


def explore(
    script: str, world: int, happenings: Happenings = QUIET, rules: Rules | None = None
) -> int:
    """Return the number of reachable states.

    Raises:
        ViolationError: If one of them is bad.
    """
    return Search(Machine(script, world, happenings, rules or Rules())).run()
