"""Says which rank a failure of the group is due to, and how that rank ended.

Made by :mod:`paceline.liveness.watch`, used by :mod:`paceline.liveness.wait_guard` as well. gloo's
errors do not say which rank is gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.errors import CollectiveError, PeerLostError
from paceline.liveness.identity import Identity
from paceline.liveness.links import SILENCE_S
from paceline.liveness.roster import PeerRoster
from paceline.observe.stall.last_seen import ended_first, last_seen

SLICE_S = 0.1
"""How often a wait looks whether somebody has died."""

DEATH_WAIT_S = 1.0
"""A connection closes a little before its process has ended."""

UNKNOWN_WAIT_S = 0.5
"""The same where one rank has not said yet who it is, so that its end cannot be seen: it is meant
if none of the others is seen to end."""

CONNECTION_CLOSED = "(With gloo: Connection closed by peer, or Connection reset by peer.)"
"""People match on gloo's words; the kernel decides which of the two gloo says."""

NO_LONGER = "The group cannot be used any more; make a new one."


class LostPeers:
    """Names the rank that is gone, in the words of an error.

    Args:
        roster: Who the ranks are.
        rank: This one.
        store_rank: The rank in whose process the store lives; None: somewhere else.

    Attributes:
        describe_end: Says, if known, how a rank ended, or the one because of which it did.
    """

    def __init__(self, roster: PeerRoster, rank: int, store_rank: int | None) -> None:
        self._roster, self._rank, self._store_rank = roster, rank, store_rank
        self.describe_end: Callable[[int], tuple[int, str] | None] = lambda _rank: None

    def error(self, what: str, cause: BaseException) -> CollectiveError:
        """Say why a collective failed; wait a moment for a death to be seen."""
        began_s = time.monotonic()
        suspects: list[int] = []
        while True:
            if not self._roster.is_complete:
                suspects = self._suspects()
            wait_s = UNKNOWN_WAIT_S if len(suspects) == 1 else DEATH_WAIT_S
            left_s = began_s + wait_s - time.monotonic()
            pause_s = left_s if self._roster.is_complete else min(left_s, SLICE_S)
            lost = self._roster.first_lost(max(pause_s, 0.0))
            if lost is not None:
                return self.first_lost_error(what, lost.rank, cause)
            if left_s <= 0:
                break
        if len(suspects) == 1:
            return self.first_lost_error(what, suspects[0], cause)
        # A rank that ends takes its groups down before its process is gone, and that takes time.
        pid, _ = ended_first(each.pid for each in self._neighbours())
        ending = next((each for each in self._neighbours() if each.pid == pid), None)
        return self.lost_error(what, ending) if ending else self._unknown(what, cause)

    def _neighbours(self) -> list[Identity]:
        """The other ranks of this host."""
        me = self._roster.identity(self._rank)
        return [each for each in self._roster.others() if me is not None and each.host == me.host]

    def _suspects(self) -> list[int]:
        """The ranks that have not said who they are; the store's, if the store does not answer."""
        missing = self._roster.learn_from_store()
        if missing is not None:
            return missing
        if self._store_rank is None or self._store_rank == self._rank:
            return []
        return [self._store_rank]

    def first_lost_error(self, what: str, rank: int, cause: BaseException | None) -> PeerLostError:
        """Name a rank that is gone, or the one because of which it went."""
        first = self._roster.agree_on_first(rank)
        lost = self._roster.identity(first)
        if lost is not None:
            return self.lost_error(what, lost)
        return self._never_came(what, first, cause)

    def lost_error(self, what: str, lost: Identity) -> PeerLostError:
        """Name the rank that has died."""
        first, how = self.describe_end(lost.rank) or (lost.rank, "")
        lost = self._roster.identity(first) or lost
        ended, words = ended_first([lost.pid] if lost in self._neighbours() else [])
        seen = last_seen(lost.pid)
        if how:
            why = f"{lost} {how}{seen}\n"
        elif ended:
            why = f"{lost} has ended {f'with {words}' if words else 'without an exception'}.{seen}"
        elif self._roster.is_unreachable(lost):
            why = (
                f"the host {lost.hostname} with {lost} has not answered for {SILENCE_S} s. Look at "
                "the link to it, and whether it runs."
            )
        else:
            why = (
                f"{lost} has died. Look at its log, and at the kernel's for a kill for lack of "
                f"memory.{seen}"
            )
        return PeerLostError(
            f"Rank {self._rank}: {what} cannot be completed, because {why} {CONNECTION_CLOSED} "
            f"{NO_LONGER}",
            rank=lost.rank,
            host=lost.hostname,
            pid=lost.pid,
            operation=what,
        )

    def _never_came(self, what: str, rank: int, cause: BaseException | None) -> PeerLostError:
        told = f" ({_first_line(cause)})" if cause is not None else ""
        return PeerLostError(
            f"Rank {self._rank}: {what} cannot be completed, because rank {rank} has died before "
            f"it said where it runs{told}. Look at its log. {NO_LONGER}",
            rank=rank,
            operation=what,
        )

    def _unknown(self, what: str, cause: BaseException) -> CollectiveError:
        return CollectiveError(
            f"Rank {self._rank}: {what} failed: {_first_line(cause)}\nNo rank is known to have "
            "died: one may have left the group, be in another collective, or be unreachable. Look "
            "at the logs of the other ranks; the group cannot be used further.",
            operation=what,
        )


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
