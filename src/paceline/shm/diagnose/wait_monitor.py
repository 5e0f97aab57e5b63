"""The thread that finds out why a wait takes long: who is missing, and what it does instead.

One for each connection, asleep in a futex until somebody rings this rank's doorbell: a peer that
waits for this rank, or this rank's own native core when a phase has taken half a second. While
nothing is wrong it never wakes, and a step costs nothing.

A wait that takes long is looked at after 0.5, 1, 2, 4, 8 and then every 10 s: the missing ranks are
asked what they do (:mod:`paceline.shm.diagnose.queries`). Then

* a rank that has destroyed its process group is lost: all ranks raise PeerLostError;
* ranks that wait for each other in different collectives are told so: see
  :mod:`paceline.shm.diagnose.deadlock`;
* whatever else it is, the log says who waits for whom after 10, 20, 40, ... s.

[Note: the monitor thread]
It holds the native cores and the pages, never the connection, whose finalizer ends it. It ends when
the connection is closed, and is a daemon in case that never happens. A forked child does not
have it, and does not close it. Whoever closes in a signal handler may hold a lock of ``logging``
that the thread waits for, so that the thread is not waited for without end.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from paceline.liveness.wait_log import WaitLog
from paceline.native.extension import native
from paceline.printable import printable
from paceline.shm.core.dtypes import describe_request, is_behind
from paceline.shm.core.members import GroupMember
from paceline.shm.core.pages import Field
from paceline.shm.diagnose.deadlock import Evidence, find_deadlock
from paceline.shm.diagnose.queries import Answer, PeerQueries
from paceline.shm.diagnose.status import StatusPages
from paceline.shm.diagnose.thread_location import locate_thread, uses_c10d_elsewhere

logger = logging.getLogger("paceline")

FIRST_LOOK_S = 0.5
LAST_INTERVAL_S = 10.0
ANSWER_TIMEOUT_S = 0.4
CLOSE_TIMEOUT_S = 5.0


@dataclass
class LongWait:
    """A wait of this rank that takes long.

    Attributes:
        key: Channel, collective and phase: what makes it this wait.
        since_s: When the collective began (monotonic).
        interval_s: Until the next look.
        log: When the log is told.
        last: What was found at the look before.
    """

    key: tuple[int, int, int]
    since_s: float
    interval_s: float = FIRST_LOOK_S
    log: WaitLog = field(default_factory=WaitLog)
    last: dict[int, Evidence] = field(default_factory=dict)


class WaitMonitor:
    """Looks after the waits of one connection."""

    _open: ClassVar[weakref.WeakValueDictionary[str, WaitMonitor]] = weakref.WeakValueDictionary()

    def __init__(
        self, key: str, members: Sequence[GroupMember], cores: Sequence[Any], status: StatusPages
    ) -> None:
        self.key = key
        self.members = members
        self.cores = cores
        self.status = status
        self.index = status.pages.index
        self.queries = PeerQueries(status, cores)
        self._waits: dict[int, LongWait] = {}
        self._told: set[int] = set()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="paceline-watch", daemon=True)
        self._open[key] = self

    def start(self) -> None:
        """Begin. A system that refuses another thread goes without: waits end at their deadline."""
        try:
            self._thread.start()
        except RuntimeError as error:
            logger.warning("Long waits will not be explained: %s", error)

    def close(self) -> None:
        """End the thread. Not in a forked child, which has none."""
        if self.status.pages.is_forked or self._is_closing:
            return
        self._is_closing = True
        self._open.pop(self.key, None)
        self.queries.ring(self.index)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_TIMEOUT_S)

    @classmethod
    def all_open(cls) -> list[WaitMonitor]:
        """Return the monitors of all connections of this process."""
        return list(cls._open.values())

    @classmethod
    def find(cls, link: str) -> tuple[WaitMonitor, Any] | None:
        """Return the monitor and the core of a channel by its name, if this process has it."""
        key, _, channel = link.partition("/")
        monitor = cls._open.get(key)
        if monitor is None or not channel.isdigit() or int(channel) >= len(monitor.cores):
            return None
        return monitor, monitor.cores[int(channel)]

    def _run(self) -> None:
        timeout_s = -1.0
        try:
            while True:
                self.queries.listen(timeout_s)
                if self._is_closing:
                    return
                timeout_s = self._look()
        except Exception:
            logger.exception("Long waits will not be explained any more")

    # --- looking ---------------------------------------------------------------------------------

    def _look(self) -> float:
        """Look at all channels; return when to look again, in seconds, or -1."""
        self._log_end()
        waits = [wait for c in range(len(self.cores)) if (wait := self._look_at(c)) is not None]
        self._waits = {wait.key[0]: wait for wait in waits}
        return min((wait.interval_s for wait in waits), default=-1.0)

    def _look_at(self, channel: int) -> LongWait | None:
        core = self.cores[channel]
        rows = [core.row(index) for index in range(len(self.members))]
        mine = rows[self.index]
        missing = [i for i, row in enumerate(rows) if is_behind(row, mine)]
        if mine.life != native.LIFE_WORKING or core.verdict().end or not missing:
            return None
        key = (channel, mine.request.seq, mine.phase)
        wait = self._waits.get(channel)
        if wait is None or wait.key != key:
            wait = LongWait(key, mine.since_ns / 1e9)
        else:
            wait.interval_s = min(wait.interval_s * 2, LAST_INTERVAL_S)
        # One that is in this collective, too, is just slow.
        absent = [i for i in missing if rows[i].life == native.LIFE_IDLE]
        answers = self.queries.ask(absent, ANSWER_TIMEOUT_S)
        if self._end_if_hopeless(wait, core, missing, answers):
            return None
        self._log(wait, rows, missing, answers)
        return wait

    def _end_if_hopeless(
        self, wait: LongWait, core: Any, missing: Sequence[int], answers: dict[int, Answer]
    ) -> bool:
        """End the group if a rank will never come; say whether that is so."""
        if not self.queries.is_destroyed():
            for peer, answer in answers.items():
                if answer.is_destroyed:
                    core.declare(native.END_LOST, peer)
                    return True
        ours = locate_thread(core.caller())
        evidence = {peer: Evidence(answer.at, ours) for peer, answer in answers.items()}
        last, wait.last = wait.last, evidence
        is_still = len(evidence) == len(missing) and evidence == last
        is_still = is_still and not uses_c10d_elsewhere(core.caller())
        link = f"{self.key}/{wait.key[0]}"
        deadlock = find_deadlock(link, evidence, self._awaits_us) if is_still else None
        if deadlock is None:
            return False
        peer, elsewhere = deadlock
        self._declare(core, wait, peer, elsewhere)
        return True

    def _awaits_us(self, link: str, peer: int) -> bool:
        """Say whether a peer waits, in another channel of Paceline's, for this rank to come."""
        found = self.find(link)
        if found is None:
            return False
        other, core = found
        pids = [member.pid for member in other.members]
        pid = self.members[peer].pid
        if pid not in pids:
            return False
        theirs, ours = core.row(pids.index(pid)), core.row(other.index)
        return theirs.life == native.LIFE_WORKING and is_behind(ours, theirs)

    # --- telling ---------------------------------------------------------------------------------

    def _declare(self, core: Any, wait: LongWait, peer: int, elsewhere: str) -> None:
        """End the group, and the one in which the peer waits if that is ours too."""
        evidence = wait.last[peer]
        assert evidence.theirs is not None
        assert evidence.ours is not None
        me, other = self.members[self.index].rank, self.members[peer].rank
        what = describe_request(core.row(self.index).request)
        text = (
            "ranks are in different collectives and wait for each other.\n"
            f"  rank {me} waits in {what}: {evidence.ours.describe()}\n"
            f"  rank {other} waits {evidence.theirs.describe()}\n"
            "All ranks must call the same collectives and run as many steps, in the same order. If "
            "some have more batches than others, train inside of `with ddp.join():`."
        )
        found = self.find(elsewhere)
        reason = {"text": text, "raises": found is not None}
        self.status.pages.write(Field.REASON, reason)
        core.declare(native.END_MISMATCH, peer)
        if found is not None:
            monitor, their_core = found
            monitor.status.pages.write(Field.REASON, reason)
            by_pid = {member.pid: index for index, member in enumerate(monitor.members)}
            their_core.declare(native.END_MISMATCH, by_pid[self.members[peer].pid])
        for index in range(len(self.members)):
            if index != self.index:
                self.queries.ring(index)

    def _log_end(self) -> None:
        """Write on this rank's log why a group has ended, if it is where nothing raises."""
        for channel, core in enumerate(self.cores):
            verdict = core.verdict()
            is_elsewhere = is_behind(core.row(self.index), core.row(verdict.by))
            if verdict.end == native.END_MISMATCH and is_elsewhere and channel not in self._told:
                self._told.add(channel)
                reason = self.status.pages.read(verdict.by, Field.REASON) or {}
                if reason.get("raises") is not True:
                    rank = self.members[self.index].rank
                    logger.error("Rank %d: %s", rank, printable(reason.get("text", "")))

    def _log(
        self,
        wait: LongWait,
        rows: Sequence[Any],
        missing: Sequence[int],
        answers: dict[int, Answer],
    ) -> None:
        waited_s = time.monotonic() - wait.since_s
        wait.interval_s = min(wait.interval_s, max(wait.log.next_s - waited_s, FIRST_LOOK_S))

        def describe() -> str:
            found = (self._describe(peer, rows[peer], answers.get(peer)) for peer in missing)
            return ": " + "; ".join(found)

        what = describe_request(rows[self.index].request)
        wait.log.tell(self.members[self.index].rank, what, waited_s, describe)

    def _describe(self, peer: int, row: Any, answer: Answer | None) -> str:
        who = self.members[peer]
        if row.life == native.LIFE_WORKING:
            return f"{who} is in this collective, too, but slow"
        ago_s = (time.monotonic_ns() - row.since_ns) / 1e9
        doing = answer.describe() if answer is not None else "it does not answer: stopped, or busy"
        return f"{who} has been in no collective of this group for {ago_s:.1f} s; {doing}"
