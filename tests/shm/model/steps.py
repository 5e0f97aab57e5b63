"""What each step of a program does to a state: on memory, when a rank arrives, when it waits."""

from __future__ import annotations

from collections.abc import Iterator

from tests.shm.model.programs import BAD, TORN
from tests.shm.model.words import State, ViolationError, Words


class Steps(Words):
    """A method for each kind of step, of the same name; returns the states that can follow."""

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
