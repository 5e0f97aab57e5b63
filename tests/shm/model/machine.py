"""All ranks together: which states can follow a state, and which must not be reached."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.shm.model.programs import USERS, Rules
from tests.shm.model.steps import Steps
from tests.shm.model.words import FAILED, State, ViolationError, with_value

# What happens to a rank rather than by it.
DEATH, TIMER, DEADLINE, ABORT, REUSE = "dies", "timer", "deadline", "abort", "reuse"


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


class Machine(Steps):
    """The transition relation for one script."""

    def __init__(self, script: str, world: int, happenings: Happenings, rules: Rules) -> None:
        super().__init__(script, world, rules)
        self.happenings = happenings

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
            gone = with_value(notes, rank, 0)
            yield DEATH, rank, (arrived, sleepers, verdict, dead | 1 << rank, memory, places, gone)
        if self.happenings.aborts and verdict is None:
            yield ABORT, rank, self._declare(state, ("aborted", rank, rank))
        step = self.programs[rank].steps[places[rank]]
        if step[0] == "asleep" and self.rules.sleeps_with_timer:
            yield TIMER, rank, self._go(state, rank, places[rank] + 1)
        if step[0] == "watch" and self.happenings.deadlines:
            yield from ((DEADLINE, rank, after) for after in self._deadline(state, rank, step))

    def _reuse(self, state: State, rank: int) -> State:
        mine = [place for place in self.locations if place[:2] == ("copy", rank)]
        return self._go(self._store(state, mine, USERS), rank, FAILED, state[6][rank] + 1)

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
