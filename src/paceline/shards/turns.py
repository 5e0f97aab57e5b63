"""Runs one function for each shard of a rank, on threads of which one runs at a time, in turn.

For layers that need all shards at once (SyncBatchNorm): there a shard *meets* the others, and the
next one runs until it meets them, too. Called by the loop over shards. Knows nothing of layers,
ranks or gradients.

[Note: turns]
The order is that of the shards, whatever the machine does: a thread hands its turn to the next one
that has not ended. When the last one of a cycle has met the others or ended, all must have met at
the same key, or all ended. What they brought is combined once, by that thread, and each goes on in
its next turn. After an error nothing is combined any more, and every shard that is still in the
middle raises :class:`ShardStopped` in its next turn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from paceline.errors import ConfigurationError
from paceline.thread_state import ThreadState, in_callers_context

T = TypeVar("T")
V = TypeVar("V")
Key = tuple[str, str]
"""What a shard does where it meets the others, and in which layer."""


class Places(Protocol):
    """Where the things of a shard are while it is not its turn."""

    def enter(self, position: int) -> None:
        """It goes on."""

    def leave(self, position: int) -> None:
        """It has met the others, or ended."""


class ShardStopped(ConfigurationError):
    """Another shard of this rank has failed, so that this one cannot go on."""


class Turns(Generic[V]):
    """The turns of one round.

    Args:
        shards: Those of this rank, for errors.
        places: Told whose turn begins and ends.
        combine: Makes of a key, and of what all shards have brought there, what each gets.
    """

    def __init__(
        self, shards: range, places: Places, combine: Callable[[Key, list[V]], list[V]]
    ) -> None:
        self._shards = shards
        self._places = places
        self._combine = combine
        self._wakes = [threading.Semaphore(0) for _ in shards]
        self._alive = list(range(len(shards)))
        self._present = 0
        self._met: dict[int, tuple[Key, V]] = {}
        self._got: list[V] = []
        self.error: BaseException | None = None

    def run(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Run a job for each shard; return what they return.

        Raises:
            BaseException: What the first that failed has raised, once all have ended.
        """
        results: list[Any] = [None] * len(jobs)
        state = ThreadState.capture()
        mains = [
            in_callers_context(lambda p=position: self._main(p, jobs[p], results, state))  # type: ignore[misc]
            for position in range(len(jobs))
        ]
        if len(jobs) == 1:
            self._wakes[0].release()
            mains[0]()
        else:
            self._run_threads(mains)
        if self.error is not None:
            raise self.error
        return results

    def _run_threads(self, mains: Sequence[Callable[[], None]]) -> None:
        threads = [
            threading.Thread(target=main, name=f"paceline shard {shard}")
            for main, shard in zip(mains, self._shards, strict=True)
        ]
        for thread in threads:
            thread.start()
        self._wakes[0].release()
        try:
            for thread in threads:
                thread.join()
        except BaseException as error:  # Ctrl-C: shards end where they meet next
            self.error = self.error or error
            for thread in threads:
                thread.join()
            raise

    def _main(
        self, position: int, job: Callable[[], Any], results: list[Any], state: ThreadState
    ) -> None:
        self._wakes[position].acquire()
        try:
            if self.error is None:
                self._places.enter(position)
                with state.entered():
                    results[position] = job()
                self._places.leave(position)
        except BaseException as error:
            self.error = self.error or error
        self._alive.remove(position)
        self._hand_on(position)

    def meet(self, key: Key, brought: V) -> V:
        """Wait in the middle of a job until all others have come here, too.

        Raises:
            ShardStopped: If some shard has failed; or has gone on to something else.
        """
        position = self._present
        self._check()
        self._places.leave(position)
        self._met[position] = key, brought
        self._hand_on(position)
        self._wakes[position].acquire()
        self._check()
        self._places.enter(position)
        return self._got[position]

    def _check(self) -> None:
        if self.error is not None:
            raise ShardStopped(
                f"Shard {self._shards[self._present]} cannot go on: {self.error}"
            ) from self.error

    def _hand_on(self, position: int) -> None:
        """Wake the next one; the last of a cycle combines first."""
        following = next((each for each in self._alive if each > position), None)
        if following is None:
            self._conclude()
            if not self._alive:
                return
            following = self._alive[0]
        self._present = following
        self._wakes[following].release()

    def _conclude(self) -> None:
        met, self._met = self._met, {}
        if self.error is not None or not met:
            return
        try:
            keys = {key for key, _ in met.values()}
            if len(keys) > 1 or len(met) < len(self._shards):
                raise ConfigurationError(self._describe(met))
            self._got = self._combine(keys.pop(), [met[each][1] for each in sorted(met)])
        except BaseException as error:
            self.error = error

    def _describe(self, met: dict[int, tuple[Key, V]]) -> str:
        places = {p: " of ".join(key) for p, (key, _) in met.items()}
        told = [f"shard {s}: {places.get(p, 'at its end')}" for p, s in enumerate(self._shards)]
        return (
            f"Shards must run the same SyncBatchNorm layers in the same order ({', '.join(told)}). "
            "Let every shard run one forward and one backward through the same layers, or use "
            "BatchNorm, whose statistics are the shard's own."
        )
