"""The words that all ranks share, and where each rank is: a state, and small changes to it.

A state is ``(arrived, sleepers, verdict, dead, memory, places, notes)``: the shared words, a bit
for each dead rank, what each location holds, where each rank is in its program, and one number
that it remembers. Whatever a rank's row says follows from its place, dead or alive.
"""

from __future__ import annotations

from tests.shm.model.programs import EMPTY, Location, Program, Rules

# A plain tuple: millions of them are hashed.
State = tuple[int, int, tuple[str, int, int] | None, int, tuple[int, ...], tuple[int, ...], tuple]
FAILED = -1


class ViolationError(AssertionError):
    """A state that must not be reachable."""


class Words:
    """The programs of all ranks, and what can be done to a state."""

    def __init__(self, script: str, world: int, rules: Rules) -> None:
        self.world = world
        self.rules = rules
        self.programs = [Program(script, rank, world, rules) for rank in range(world)]
        self.locations: dict[Location, int] = {}
        for program in self.programs:
            for step in program.steps:
                if step[0] in ("tear", "see", "mix"):
                    for place in step[1]:
                        self.locations.setdefault(place, len(self.locations))
        self.last_phase = self.programs[0].phase

    def start(self) -> State:
        nothing = (0,) * self.world
        return (0, 0, None, 0, (EMPTY,) * len(self.locations), nothing, nothing)

    def _is_complete(self, state: State, phase: int) -> bool:
        if self.rules.resets_the_count:
            return state[0] == self.world
        return state[0] >= self.world * phase

    def _is_gone(self, state: State, rank: int) -> bool:
        return bool(state[3] >> rank & 1) or state[5][rank] == self.programs[rank].done

    def _row(self, state: State, rank: int) -> int:
        place = state[5][rank]
        return self.programs[rank].noted[place] if place != FAILED else state[6][rank] // 2

    def _go(self, state: State, rank: int, place: int, note: int = 0) -> State:
        places, notes = with_value(state[5], rank, place), with_value(state[6], rank, note)
        return (*state[:5], places, notes)

    def _fail(self, state: State, rank: int) -> State:
        """Raise. What is remembered from then on is the row, doubled, plus 1 after reuse."""
        return self._go(state, rank, FAILED, 2 * self._row(state, rank))

    def _next(self, state: State, rank: int, note: int = 0) -> State:
        return self._go(state, rank, state[5][rank] + 1, note)

    def _store(self, state: State, places: list[Location], value: int) -> State:
        memory = list(state[4])
        for place in places:
            memory[self.locations[place]] = value
        return (*state[:4], tuple(memory), *state[5:])

    def _holds(self, state: State, places: list[Location], value: int) -> bool:
        return all(state[4][self.locations[place]] == value for place in places)

    def _declare(self, state: State, verdict: tuple[str, int, int]) -> State:
        state = (*state[:2], state[2] or verdict, *state[3:])
        return self._wake_sleepers(state)

    def _wake_sleepers(self, state: State) -> State:
        for rank, place in enumerate(state[5]):
            program = self.programs[rank]
            is_there = 0 <= place < program.done and not state[3] >> rank & 1
            if is_there and program.steps[place][0] == "asleep":
                state = self._next(state, rank)
        return state


def with_value(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])
