"""Waits for the collectives of a c10d group with an eye on its ranks.

Whatever Paceline sends over a process group is waited for here: buckets, buffers, agreements,
statistics, slices between hosts. gloo's errors do not say which rank is gone, and gloo does not
always notice: a rank that has raised, and lives, keeps the others waiting. So a wait looks every
:data:`SLICE_S` whether somebody has died, and an error of the group becomes a PeerLostError.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar, cast

from paceline.errors import CollectiveError, PacelineError, PeerFailedError, PeerLostError
from paceline.liveness.lost_peers import SLICE_S, LostPeers
from paceline.liveness.roster import Gather, PeerRoster
from paceline.liveness.wait_guard import GRACE_S, ONE_WAY_GRACE_S, WaitGuard

T = TypeVar("T")

POLL_S = 0.001
_SLICE = timedelta(seconds=SLICE_S)


class Watch:
    """Watches the ranks of one group. Made by :func:`paceline.liveness.watch_of`.

    Attributes:
        rank: This one, in the group.
        roster: Who the ranks are.
        lost_peers: Names the rank that is gone.
        is_given_up: The connections of the group are cut, and its waits are to end.
        keeps: Told of a collective that has not ended when its wait has.

    Args:
        store: Of the group.
        rank: In the group.
        world: How many ranks it has.
        has_slices: ``Work.wait(timeout)`` may be called again after a time-out.
        store_rank: The rank in whose process the store lives; None: somewhere else.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world: int,
        *,
        has_slices: bool = True,
        store_rank: int | None = None,
    ) -> None:
        self.rank = rank
        self._has_slices = has_slices
        self.is_given_up = False
        self.keeps: Callable[[Any], None] = lambda _work: None
        self._attempts = 0
        self._is_attempting = False
        self.roster = PeerRoster(store, rank, world)
        self.lost_peers = LostPeers(self.roster, rank, store_rank)

    def meet(self, gather: Gather) -> None:
        """Learn who the ranks are, once. Collective over the group, the first time."""
        if not self.roster.is_complete:
            self.roster.meet(gather)

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Something that all ranks do together, and in the same order: if one fails, all hear it.

        Raises:
            PeerFailedError: Another rank has failed, inside of a wait of this one.
        """
        self._attempts += 1
        self._is_attempting = True
        try:
            yield
        except Exception as error:
            if not isinstance(error, (PeerLostError, PeerFailedError)):
                self.roster.tell_failure(self._attempts, f"{type(error).__name__}: {error}")
            raise
        finally:
            self._is_attempting = False

    def check_attempt(self, what: str) -> None:
        """Raise if a rank has failed in what all attempt."""
        found = self.roster.failure(self._attempts) if self._is_attempting else None
        if found is not None and found[0] != self.rank:
            rank, text = found
            raise PeerFailedError(
                f"Rank {self.rank}: {what} was given up, because rank {rank} failed in it: {text}",
                rank=rank,
                operation=what,
            )

    def run(self, what: str, start: Callable[[], Any], *, one_way: bool = False) -> None:
        """Start a collective and wait for it.

        Args:
            what: For errors: "broadcast of buffers".
            start: Returns a c10d ``Work``.
            one_way: Some ranks may be done before others have come.

        Raises:
            PeerLostError: A rank has died.
            CollectiveError: The group has failed, and nobody is known to have died.
        """
        self.wait(what, self.start(what, start), one_way=one_way)

    def start(self, what: str, start: Callable[[], T]) -> T:
        """Start a collective; see :meth:`run`."""
        try:
            return start()
        except PacelineError:
            raise
        except RuntimeError as error:
            raise self.error(what, error) from error

    def wait(self, what: str, work: Any, *, one_way: bool = False) -> None:
        """Wait for a collective that has been started; see :meth:`run`."""
        if not self._has_slices:
            self._wait_plainly(what, work)
            return
        guard = WaitGuard(self, what, ONE_WAY_GRACE_S if one_way else GRACE_S)
        while True:
            try:
                work.wait(_SLICE)
                return
            except RuntimeError as error:
                if work.is_completed():
                    self._wait_plainly(what, work)
                    return
                self._check(guard, work, error)

    def _check(self, guard: WaitGuard, work: Any, cause: BaseException) -> None:
        try:
            guard.check(cause)
        except BaseException:
            self.keeps(work)
            raise

    def wait_future(self, what: str, future: Any, timeout_s: float) -> bool:
        """Wait until a future is done, well or not; say whether it is.

        Raises:
            PeerLostError: A rank has died, and the future is not done soon after.
        """
        if future.done():
            return True
        is_done = threading.Event()
        future.add_done_callback(lambda _: is_done.set())
        guard = WaitGuard(self, what)
        until_s = time.monotonic() + timeout_s
        while not is_done.wait(SLICE_S):
            if time.monotonic() > until_s:
                return False
            guard.check()
        return True

    def wait_until(self, what: str, is_so: Callable[[], bool], timeout: timedelta) -> bool:
        """Poll until something is so; say whether it is.

        Raises:
            PeerLostError: A rank has died, and it is not so soon after.
        """
        guard = WaitGuard(self, what)
        pause_s = POLL_S
        until_s = time.monotonic() + timeout.total_seconds()
        while not is_so():
            if time.monotonic() > until_s:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, SLICE_S)
            if pause_s == SLICE_S:
                guard.check()
        return True

    def call(self, what: str, function: Callable[[], T]) -> T:
        """Call something that waits for all ranks and cannot be asked how it gets on.

        To make a group is such a thing. If a rank dies meanwhile, the thread that it is called on
        is left behind: it ends with the group's time-out.

        Raises:
            PeerLostError: A rank has died.
        """
        outcome: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                outcome.put((function(), None))
            except BaseException as error:
                outcome.put((None, error))

        threading.Thread(target=run, name="paceline-call", daemon=True).start()
        guard = WaitGuard(self, what)
        while True:
            with contextlib.suppress(queue.Empty):
                value, error = outcome.get(timeout=SLICE_S)
                break
            guard.check()
        try:
            if isinstance(error, RuntimeError) and not isinstance(error, PacelineError):
                raise self.error(what, error) from error
            if error is not None:
                raise error
        finally:
            del error  # its traceback has this frame: all below would live until a collection
        return cast(T, value)

    def error(self, what: str, cause: BaseException) -> CollectiveError:
        """Say why a collective failed; wait a moment for a death to be seen."""
        return self.lost_peers.error(what, cause)

    def _wait_plainly(self, what: str, work: Any) -> None:
        try:
            work.wait()
        except PacelineError:
            raise
        except RuntimeError as error:
            raise self.error(what, error) from error
