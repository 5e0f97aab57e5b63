"""Waits for the collectives of a c10d group with an eye on its ranks.

Whatever Paceline sends over a process group is waited for here: buckets, buffers, agreements,
statistics, slices between hosts. gloo's errors do not say which rank is gone, and gloo does not
always notice: a rank that has raised, and lives, keeps the others waiting. So a wait looks every
:data:`SLICE_S` whether somebody has died, and an error of the group becomes a PeerLostError.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from paceline.config import BACKEND_NAME
from paceline.errors import CollectiveError, PacelineError, PeerFailedError, PeerLostError
from paceline.forks import finalize_here
from paceline.liveness.identity import Identity
from paceline.liveness.links import SILENCE_S
from paceline.liveness.roster import Gather, Roster
from paceline.torch_private import group_store

T = TypeVar("T")
logger = logging.getLogger("paceline")

SLICE_S = 0.1
POLL_S = 0.001
_SLICE = timedelta(seconds=SLICE_S)
GRACE_S = 0.5
"""What a dead rank has sent may still be on its way; gloo's own error mostly comes first."""

ONE_WAY_GRACE_S = 5.0
"""Of a broadcast: its source may be done, and end in good order, long before the others."""

DEATH_WAIT_S = 1.0
"""A connection closes a little before its process has ended."""

UNKNOWN_WAIT_S = 0.5
"""The same where one rank has not said yet who it is, so that its end cannot be seen: it is meant
if none of the others is seen to end."""

LOG_AFTER_S = 10.0
"""A wait is on the log after this long, then after twice as long, and so on."""

_NAMED = 8  # ranks in one line of the log
_WAITS_IN_SLICES = ("gloo", BACKEND_NAME)
NO_LONGER = "The group cannot be used any more; make a new one."


class Watch:
    """Watches the ranks of one group. Made by :func:`watch_of`.

    Attributes:
        rank: This one, in the group.
        roster: Who the ranks are.
        tell_end: Says, where that is known, how a rank ended, or the one because of which it did.

    Args:
        store: Of the group.
        rank: In the group.
        world: How many ranks it has.
        has_slices: ``Work.wait(timeout)`` may be called again after a time-out.
        keeper: The rank in whose process the store lives; None: somewhere else.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world: int,
        *,
        has_slices: bool = True,
        keeper: int | None = None,
    ) -> None:
        self.rank = rank
        self._has_slices = has_slices
        self._keeper = keeper
        self._attempts = 0
        self._is_attempting = False
        self.tell_end: Callable[[int], tuple[int, str] | None] = lambda _rank: None
        self.roster = Roster(store, rank, world)

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
        patience = Patience(self, what, ONE_WAY_GRACE_S if one_way else GRACE_S)
        while True:
            try:
                work.wait(_SLICE)
                return
            except RuntimeError as error:
                if work.is_completed():
                    self._wait_plainly(what, work)
                    return
                patience.look(error)

    def wait_future(self, what: str, future: Any, timeout_s: float) -> bool:
        """Wait until a future is done, well or not; say whether it is.

        Raises:
            PeerLostError: A rank has died, and the future is not done soon after.
        """
        if future.done():
            return True
        is_done = threading.Event()
        future.add_done_callback(lambda _: is_done.set())
        patience = Patience(self, what, GRACE_S)
        until_s = time.monotonic() + timeout_s
        while not is_done.wait(SLICE_S):
            if time.monotonic() > until_s:
                return False
            patience.look(None)
        return True

    def wait_until(self, what: str, is_so: Callable[[], bool], timeout: timedelta) -> bool:
        """Poll until something is so; say whether it is.

        Raises:
            PeerLostError: A rank has died, and it is not so soon after.
        """
        patience = Patience(self, what, GRACE_S)
        pause_s = POLL_S
        until_s = time.monotonic() + timeout.total_seconds()
        while not is_so():
            if time.monotonic() > until_s:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, SLICE_S)
            if pause_s == SLICE_S:
                patience.look(None)
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
        patience = Patience(self, what, GRACE_S)
        while True:
            with contextlib.suppress(queue.Empty):
                value, error = outcome.get(timeout=SLICE_S)
                break
            patience.look(None)
        if isinstance(error, RuntimeError) and not isinstance(error, PacelineError):
            raise self.error(what, error) from error
        if error is not None:
            raise error
        return cast(T, value)

    def _wait_plainly(self, what: str, work: Any) -> None:
        try:
            work.wait()
        except PacelineError:
            raise
        except RuntimeError as error:
            raise self.error(what, error) from error

    # --- who it was ----------------------------------------------------------------------------

    def error(self, what: str, cause: BaseException) -> CollectiveError:
        """Say why a collective failed; wait a moment for a death to be seen."""
        began_s = time.monotonic()
        suspects: list[int] = []
        while True:
            if not self.roster.is_complete:
                suspects = self._suspects()
            wait_s = UNKNOWN_WAIT_S if len(suspects) == 1 else DEATH_WAIT_S
            left_s = began_s + wait_s - time.monotonic()
            pause_s = left_s if self.roster.is_complete else min(left_s, SLICE_S)
            lost = self.roster.first_lost(max(pause_s, 0.0))
            if lost is not None:
                return self._settled(what, lost.rank, cause)
            if left_s <= 0:
                break
        if len(suspects) == 1:
            return self._settled(what, suspects[0], cause)
        return self._unknown(what, cause)

    def _suspects(self) -> list[int]:
        """The ranks that have not said who they are; the store's, if the store does not answer."""
        missing = self.roster.learn_from_store()
        if missing is not None:
            return missing
        if self._keeper is None or self._keeper == self.rank:
            return []
        return [self._keeper]

    def _settled(self, what: str, rank: int, cause: BaseException | None) -> PeerLostError:
        """Name a rank that is gone, or the one because of which it went."""
        first = self.roster.settle(rank)
        lost = self.roster.identity(first)
        if lost is not None:
            return self.lost_error(what, lost)
        return self._never_came(what, first, cause)

    def lost_error(self, what: str, lost: Identity) -> PeerLostError:
        """Name the rank that has died."""
        first, how = self.tell_end(lost.rank) or (lost.rank, "")
        lost = self.roster.identity(first) or lost
        if how:
            why = f"{lost} {how}\n"
        elif self.roster.is_unreachable(lost):
            why = (
                f"the host {lost.hostname} with {lost} has not answered for {SILENCE_S} s. Look at "
                "the link to it, and whether it runs."
            )
        else:
            why = (
                f"{lost} has died. Look at its log, and at the kernel's for a kill for lack of "
                "memory."
            )
        return PeerLostError(
            f"Rank {self.rank}: {what} cannot be completed, because {why} {NO_LONGER}",
            rank=lost.rank,
            host=lost.hostname,
            pid=lost.pid,
            operation=what,
        )

    def _never_came(self, what: str, rank: int, cause: BaseException | None) -> PeerLostError:
        told = f" ({_first_line(cause)})" if cause is not None else ""
        return PeerLostError(
            f"Rank {self.rank}: {what} cannot be completed, because rank {rank} has died before "
            f"it said where it runs{told}. Look at its log. {NO_LONGER}",
            rank=rank,
            operation=what,
        )

    def _unknown(self, what: str, cause: BaseException) -> CollectiveError:
        return CollectiveError(
            f"Rank {self.rank}: {what} failed: {_first_line(cause)}\nNo rank is known to have "
            "died: one may have left the group, be in another collective, or be unreachable. Look "
            "at the logs of the other ranks; the group cannot be used further.",
            operation=what,
        )


class Patience:
    """One wait: whether a death has been seen, and since when."""

    def __init__(self, watch: Watch, what: str, grace_s: float) -> None:
        self._watch, self._what, self._grace_s = watch, what, grace_s
        self._since_s = time.monotonic()
        self._next_log_s = LOG_AFTER_S
        self._seen_s: float | None = None

    def look(self, cause: BaseException | None) -> None:
        """Called after each slice: raise if a rank has died and the grace is over."""
        roster = self._watch.roster
        self._watch.check_attempt(self._what)
        if not roster.is_complete:
            roster.learn_from_store()
        lost = roster.first_lost()
        if lost is None:
            self._explain()
            return
        now_s = time.monotonic()
        if self._seen_s is None:
            self._seen_s = now_s
        # A host that is silent has nothing on its way.
        grace_s = GRACE_S if roster.is_unreachable(lost) else self._grace_s
        if now_s - self._seen_s >= grace_s:
            raise self._watch._settled(self._what, lost.rank, cause) from cause

    def _explain(self) -> None:
        """Say on the log what takes so long. Over a process group nobody knows who is late."""
        waited_s = time.monotonic() - self._since_s
        if waited_s < self._next_log_s:
            return
        self._next_log_s *= 2
        others = list(map(str, self._watch.roster.others()))
        more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        logger.warning(
            "Rank %d has waited for %.0f s in %s, over its process group, for one of %s%s. None of "
            "them is known to have died.",
            self._watch.rank,
            waited_s,
            self._what,
            ", ".join(others[:_NAMED]) or "ranks that have not said yet where they run",
            more,
        )


_watches: weakref.WeakKeyDictionary[Any, Watch] = weakref.WeakKeyDictionary()


def watch_of(group: dist.ProcessGroup) -> Watch:
    """Return the watch of a group; it lasts as long as the group."""
    watch = _watches.get(group)
    if watch is None:
        ranks = dist.get_process_group_ranks(group)
        # torchrun's agent keeps the store for its workers; without it, rank 0 of all does.
        by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        watch = Watch(
            group_store(group),
            group.rank(),
            group.size(),
            has_slices=dist.get_backend(group) in _WAITS_IN_SLICES,
            keeper=ranks.index(0) if 0 in ranks and not by_agent else None,
        )
        adopt(group, watch)
    return watch


def adopt(group: dist.ProcessGroup, watch: Watch) -> None:
    """Give a group a watch that was made for it; it is closed when the group goes."""
    _watches[group] = watch
    finalize_here(group, watch.roster.close)


def gather_all(group: dist.ProcessGroup, mine: torch.Tensor, what: str) -> list[torch.Tensor]:
    """Give every rank the tensors of all ranks, in rank order. All have one size and dtype."""
    out = [torch.empty_like(mine) for _ in range(group.size())]
    watch_of(group).run(what, lambda: group.allgather([out], [mine]))
    return out


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
