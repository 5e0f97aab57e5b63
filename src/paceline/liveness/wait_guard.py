"""Ends a wait over a process group when a rank has died, and logs one that takes long.

Called by :mod:`paceline.liveness.watch`, and by waits of other packages that go on in slices.

[Note: what gloo forgets]
When a connection ends, gloo fails the messages that have not begun, and forgets those that have:
the send that is in its queue (half written, or begun after this side was shut down and before gloo
has looked), and the receive that is half read. Nothing but the group's time-out ends them, and a
group that is destroyed waits for them (measured with torch 2.13). So
- once connections are cut on purpose (``give_up_waits``), a wait ends after :data:`GRACE_S`;
- a group with a collective that nobody waits for any more is kept until that has ended.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from paceline.errors import CollectiveError
from paceline.liveness.wait_log import WaitLog
from paceline.printable import listed

if TYPE_CHECKING:
    from paceline.liveness.watch import Watch

GRACE_S = 0.5
"""What a dead rank has sent may still be on its way; gloo's own error mostly comes first."""

ONE_WAY_GRACE_S = 5.0
"""Of a broadcast: its source may be done, and end in good order, long before the others."""

_NAMED = 8  # ranks in one line of the log


class WaitGuard:
    """One wait: whether a death has been seen, and since when.

    Args:
        watch: Of the group.
        what: For errors and the log.
        grace_s: How long after a death the wait may still end well.
    """

    def __init__(self, watch: Watch, what: str, grace_s: float = GRACE_S) -> None:
        self._watch, self._what, self._grace_s = watch, what, grace_s
        self._since_s = time.monotonic()
        self._log = WaitLog()
        self._seen_s: float | None = None
        self._cut_s: float | None = None

    def check(self, cause: BaseException | None = None) -> None:
        """Called after each slice: raise if a rank has died and the grace is over."""
        roster = self._watch.roster
        self._watch.check_attempt(self._what)
        if not roster.is_complete:
            roster.learn_from_store()
        lost = roster.first_lost()
        if lost is None and self._watch.is_given_up:
            self._check_given_up(cause)
            return
        if lost is None:
            waited_s = time.monotonic() - self._since_s
            self._log.tell(self._watch.rank, self._what, waited_s, self._describe)
            return
        now_s = time.monotonic()
        if self._seen_s is None:
            self._seen_s = now_s
        # A host that is silent has nothing on its way.
        grace_s = GRACE_S if roster.is_unreachable(lost) else self._grace_s
        if now_s - self._seen_s >= grace_s:
            raise self._watch.lost_peers.first_lost_error(self._what, lost.rank, cause) from cause

    def _check_given_up(self, cause: BaseException | None) -> None:
        """[Note: what gloo forgets]."""
        now_s = time.monotonic()
        self._cut_s = self._cut_s or now_s
        if now_s - self._cut_s >= GRACE_S:
            raise CollectiveError(
                f"Rank {self._watch.rank}: {self._what} was given up: the connections to the other "
                "ranks were cut, because the epoch of the elastic job is over",
                operation=self._what,
            ) from cause

    def _describe(self) -> str:
        """Over a process group nobody knows who is late."""
        others = list(self._watch.roster.others())
        named = listed(others, _NAMED) or "ranks that have not said yet where they run"
        return f", over its process group, for one of {named}. None of them is known to have died."
