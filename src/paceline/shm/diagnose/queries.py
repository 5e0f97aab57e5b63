"""Asking a peer what it is doing, and answering: through the pages.

Whoever asks rings the peer's doorbell: a futex in the peer's page. The peer's monitor thread wakes,
writes an ANSWER that repeats the doorbell's count, and sleeps on; the one who asked reads the page
until the answer is as new as its question. A peer that is stopped, dead or too busy does not
answer, and nobody waits long for it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.native.extension import native
from paceline.printable import printable
from paceline.shm.core.pages import Field, Pages
from paceline.shm.diagnose.status import StatusPages
from paceline.shm.diagnose.thread_location import ThreadLocation, locate_thread
from paceline.torch_private.groups import registered_name


@dataclass(frozen=True)
class Answer:
    """What a rank says that it is doing.

    Attributes:
        at: Where the thread is that took part in the last collective; None if it has ended.
        is_destroyed: Its process group was destroyed.
        ended_with: The exception that ended that thread, if one did.
    """

    at: ThreadLocation | None
    is_destroyed: bool
    ended_with: str = ""

    def describe(self) -> str:
        """For people."""
        if self.is_destroyed:
            return "it has called destroy_process_group()"
        if self.at is not None:
            return printable(self.at.describe())
        why = f" with {self.ended_with}" if self.ended_with else ""
        return f"the thread that was in its last collective has ended{why}"


class PeerQueries:
    """This rank's end of the talk.

    Attributes:
        subject: The c10d group for which the ranks share memory, if there is one; not kept alive.
    """

    def __init__(self, status: StatusPages, cores: Sequence[Any]) -> None:
        self._status = status
        self._pages: Pages = status.pages
        self._cores = cores
        self._seen = 0
        self.subject: weakref.ref[Any] | None = None

    def ring(self, index: int) -> None:
        """Ring a rank's doorbell."""
        native.ring_doorbell(self._pages.doorbell_address(index))

    def listen(self, timeout_s: float) -> None:
        """Wait for a ring, for ever if the time-out is negative, and answer it."""
        address = self._pages.doorbell_address(self._pages.index)
        count = native.await_doorbell(address, self._seen, timeout_s)
        if count != self._seen:
            self._seen = count
            self._answer()

    def ask(self, peers: Sequence[int], timeout_s: float) -> dict[int, Answer]:
        """Ask ranks what they are doing; without those that do not answer in time."""
        until_s = time.monotonic() + timeout_s
        before = {peer: self._count_of(peer) for peer in peers}
        for peer in peers:
            self.ring(peer)
        found: dict[int, Answer] = {}
        while len(found) < len(peers) and time.monotonic() < until_s:
            self.listen(0.01)  # others may ask us meanwhile
            for peer in peers:
                answer = self._read(peer, newer_than=before[peer])
                if answer is not None:
                    found[peer] = answer
        return found

    def is_destroyed(self) -> bool:
        """Say whether this rank's process group has been destroyed."""
        group = self.subject() if self.subject is not None else None
        return self.subject is not None and (group is None or registered_name(group) is None)

    def _answer(self) -> None:
        ident = self._cores[0].caller()
        at = locate_thread(ident)
        value: dict[str, Any] = {"doorbell": self._seen, "destroyed": self.is_destroyed()}
        value["at"] = None if at is None else asdict(at)
        ended_with = self._status.dead_threads.get(ident, "") if at is None else ""
        self._pages.write(Field.ANSWER, value | {"text": ended_with})

    def _count_of(self, peer: int) -> int:
        value = self._pages.read(peer, Field.ANSWER) or {}
        count = value.get("doorbell", 0)
        return count if isinstance(count, int) else 0

    def _read(self, peer: int, newer_than: int) -> Answer | None:
        value = self._pages.read(peer, Field.ANSWER)
        if value is None or self._count_of(peer) == newer_than:
            return None
        try:
            at = None if value.get("at") is None else ThreadLocation.from_json(value["at"])
        except ValueError:
            return None
        return Answer(at, value.get("destroyed") is True, printable(value.get("text", "")))
