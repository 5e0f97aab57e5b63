"""All ranks together: which states can follow a state.

A state is ``(arrived, sleepers, verdict, dead, memory, places, notes)``: the shared words, a bit
for each dead rank, what each location holds, where each rank is in its program, and one number
that it remembers. Whatever a rank's row says follows from its place, dead or alive.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.shm.model.programs import BAD, EMPTY, TORN, USERS, Location, Program, Rules

State = tuple[int, int, tuple[str, int, int] | None, int, tuple[int, ...], tuple[int, ...], tuple]
FAILED = -1
# What happens to a rank rather than by it.
DEATH, TIMER, DEADLINE, ABORT, REUSE = "dies", "timer", "deadline", "abort", "reuse"


class ViolationError(AssertionError):
    """A state that must not be reachable."""


@dataclass(frozen=True)
class Happenings:
    """What may happen at any moment, besides the ranks' own steps.

    Attributes:
        deaths: How many ranks may be killed, at any step.
        deadlines: A wait may reach its deadline (so may the wait for a stopped rank).
        aborts: A rank may call abort() from another thread.
        reuse: A rank that has raised may write to its copy at once.
    """

    deaths: int = 0
    deadlines: bool = False
    aborts: bool = False
    reuse: bool = False


class Machine:
    """The transition relation for one script."""

    def __init__(self, script: str, world: int, happenings: Happenings, rules: Rules) -> None:
        self.world = world
        self.rules = rules
        self.happenings = happenings
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

    # --- what follows ----------------------------------------------------------------------------

    def successors(self, state: State) -> Iterator[tuple[str, int, State]]:
        """Yield (what, rank, state)."""
        for rank in range(self.world):
            if state[3] >> rank & 1:
                continue
            place = state[5][rank]
            program = self.programs[rank]
            if place == FAILED:
                if self.happenings.reuse and not state[6][rank] % 2:
                    yield REUSE, rank, self._reuse(state, rank)
                continue
            if place < program.done:
                yield from self._events(state, rank)
                step = program.steps[place]
                for following in getattr(self, f"_{step[0]}")(state, rank, step):
                    yield step[0], rank, following

    def _events(self, state: State, rank: int) -> Iterator[tuple[str, int, State]]:
        arrived, sleepers, verdict, dead, memory, places, notes = state
        if dead.bit_count() < self.happenings.deaths:
            gone = _with(notes, rank, 0)
            yield DEATH, rank, (arrived, sleepers, verdict, dead | 1 << rank, memory, places, gone)
        if self.happenings.aborts and verdict is None:
            yield ABORT, rank, self._declare(state, ("aborted", rank, rank))
        step = self.programs[rank].steps[places[rank]]
        if step[0] == "asleep" and self.rules.sleeps_with_timer:
            yield TIMER, rank, self._go(state, rank, places[rank] + 1)
        if step[0] == "watch" and self.happenings.deadlines:
            yield from ((DEADLINE, rank, after) for after in self._deadline(state, rank, step))

    def is_over(self, state: State) -> bool:
        """Say whether every rank that lives has returned or raised."""
        return all(
            state[3] >> rank & 1 or place in (FAILED, self.programs[rank].done)
            for rank, place in enumerate(state[5])
        )

    # --- judging ---------------------------------------------------------------------------------

    def check(self, state: State) -> None:
        """Raise if a live rank sleeps for ever although its phase is complete.

        Whoever completed the phase must be about to wake it. If that one died in between, the
        timer is the way out: forty milliseconds, once.
        """
        for rank, place in enumerate(state[5]):
            program = self.programs[rank]
            if state[3] >> rank & 1 or place == FAILED or place == program.done:
                continue
            if program.steps[place][0] != "asleep":
                continue
            phase = program.waits_for[place]
            if self._is_complete(state, phase) and not self._has_waker(state, phase):
                raise ViolationError(f"lost wake-up: rank {rank} sleeps, phase {phase} is complete")

    def _has_waker(self, state: State, phase: int) -> bool:
        return any(
            self.programs[rank].wakes_for.get(place) == phase for rank, place in enumerate(state[5])
        )

    def check_end(self, state: State) -> None:
        """Judge a state in which all that live have returned or raised."""
        _, sleepers, verdict, dead, _, places, _ = state
        live = [rank for rank in range(self.world) if not dead >> rank & 1]
        failed = [rank for rank in live if places[rank] == FAILED]
        if not dead and verdict is None and (failed or sleepers):
            raise ViolationError(f"nothing happened, but {failed} failed, {sleepers} sleepers")
        if not dead and verdict is not None and verdict[0] == "lost":
            raise ViolationError(f"nobody died, but {verdict}")
        for rank in range(self.world):
            if dead >> rank & 1:
                early = self.programs[rank].counted[places[rank]] < self.last_phase
                if early and failed != live:
                    raise ViolationError(f"rank {rank} died early, but only {failed} raised")

    # --- small things ----------------------------------------------------------------------------

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
        places, notes = _with(state[5], rank, place), _with(state[6], rank, note)
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

    def _reuse(self, state: State, rank: int) -> State:
        mine = [place for place in self.locations if place[:2] == ("copy", rank)]
        return self._go(self._store(state, mine, USERS), rank, FAILED, state[6][rank] + 1)

    # --- steps on memory -------------------------------------------------------------------------

    def _begin(self, state: State, rank: int, _: tuple) -> list[State]:
        return [self._fail(state, rank) if state[2] else self._next(state, rank)]

    def _tear(self, state: State, rank: int, step: tuple) -> list[State]:
        return [self._next(self._store(state, step[1], TORN), rank)]

    def _put(self, state: State, rank: int, step: tuple) -> list[State]:
        return [self._next(self._store(state, step[1], step[2]), rank)]

    def _see(self, state: State, rank: int, step: tuple) -> list[State]:
        if not self._holds(state, step[1], step[2]):
            found = {place: state[4][self.locations[place]] for place in step[1]}
            raise ViolationError(f"rank {rank} takes {found} for version {step[2]}")
        return [self._next(state, rank)]

    def _mix(self, state: State, rank: int, step: tuple) -> list[State]:
        """Read all copies; what is wrong is remembered, and is a fault only if it is returned."""
        is_right = self._holds(state, step[1], step[2])
        return [self._next(self._store(state, step[1], TORN), rank, int(is_right))]

    def _mixed(self, state: State, rank: int, step: tuple) -> list[State]:
        value = step[2] if state[6][rank] else BAD
        return [self._next(self._store(state, step[1], value), rank)]

    # --- arriving --------------------------------------------------------------------------------

    def _count(self, state: State, rank: int, step: tuple) -> list[State]:
        arrived = state[0] + 1
        if self.rules.resets_the_count and state[0] == self.world:
            arrived = 1
        # When sleepers are looked for too early, what was seen is remembered.
        return [self._next((arrived, *state[1:]), rank, state[6][rank])]

    def _look(self, state: State, rank: int, step: tuple) -> list[State]:
        saw = int(state[1] != 0)
        if not self.rules.counts_before_looking:
            return [self._next(state, rank, saw)]
        wakes = saw and self._is_complete(state, step[1]) and self.rules.wakes
        return [self._go(state, rank, state[5][rank] + (1 if wakes else 2))]

    def _wake(self, state: State, rank: int, step: tuple) -> list[State]:
        if self.rules.counts_before_looking or state[6][rank]:
            state = self._wake_sleepers(state)
        return [self._next(state, rank)]

    def _note(self, state: State, rank: int, step: tuple) -> list[State]:
        return [self._next(state, rank)]

    # --- waiting ---------------------------------------------------------------------------------

    def _check(self, state: State, rank: int, step: tuple) -> list[State]:
        if self._is_complete(state, step[1]):
            return [self._go(state, rank, step[3])]
        return [self._next(state, rank)]

    def _watch(self, state: State, rank: int, step: tuple) -> list[State]:
        """Look at the verdict and, now and then, at the peers."""
        if state[2] and self.rules.waiters_see_verdicts:
            return [self._fail(state, rank)]
        found = [self._go(state, rank, step[2] + 4)]
        gone = [peer for peer in range(self.world) if self._is_gone(state, peer)]
        if gone and self.rules.watches:
            lost = self._find_lost(state, gone, step[1])
            if lost is not None:
                found.append(self._go(state, rank, step[2] + 2, lost))
            elif not self._is_complete(state, step[1]):
                raise ViolationError(f"rank {rank} waits for a live rank, though {gone} is gone")
        return found

    def _find_lost(self, state: State, gone: list[int], phase: int) -> int | None:
        missing = [peer for peer in range(self.world) if self._row(state, peer) < phase]
        late = [peer for peer in gone if peer in missing]
        if late:
            return late[0]
        return gone[-1] if self.rules.any_gone_rank_is_lost or not missing else None

    def _lost(self, state: State, rank: int, step: tuple) -> list[State]:
        if self.rules.looks_again_after_watching and self._is_complete(state, step[1]):
            return [self._go(state, rank, step[3])]
        declared = self._declare(state, ("lost", rank, state[6][rank]))
        return [self._fail(declared, rank)]

    def _deadline(self, state: State, rank: int, step: tuple) -> Iterator[State]:
        missing = [peer for peer in range(self.world) if self._row(state, peer) < step[1]]
        if missing:
            yield self._go(state, rank, step[2] + 3, missing[0])
        elif not self._is_complete(state, step[1]):
            raise ViolationError(f"rank {rank} is late, and its rows say that nobody is missing")

    def _late(self, state: State, rank: int, step: tuple) -> list[State]:
        declared = self._declare(state, ("timeout", rank, state[6][rank]))
        done = self._is_complete(state, step[1])
        return [self._go(declared, rank, step[3]) if done else self._fail(declared, rank)]

    def _announce(self, state: State, rank: int, step: tuple) -> list[State]:
        return [self._next((state[0], state[1] + 1, *state[2:]), rank, state[6][rank])]

    def _value(self, state: State, rank: int, step: tuple) -> list[State]:
        stays = not self._is_complete(state, step[1]) and not state[2]
        if stays:
            return [self._next(state, rank, state[0])]
        # Not to sleep; whoever has not announced itself yet must not sign off either.
        leave = step[3] - 1 if self.rules.announces_before_looking else step[2]
        return [self._go(state, rank, leave)]

    def _futex(self, state: State, rank: int, step: tuple) -> list[State]:
        sleeps = state[0] == state[6][rank] or not self.rules.kernel_compares
        return [self._go(state, rank, state[5][rank] + (1 if sleeps else 2))]

    def _asleep(self, state: State, rank: int, step: tuple) -> list[State]:
        return []

    def _leave(self, state: State, rank: int, step: tuple) -> list[State]:
        return [self._go((state[0], state[1] - 1, *state[2:]), rank, step[2])]


def _with(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])
