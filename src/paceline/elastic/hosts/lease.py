"""Leases: a host that loses the coordinator stops its ranks before the others go on without it.

Pure: moments are handed in. :class:`HostLease` is a launcher's view, :class:`LeaseTable` the
coordinator's. Moments are read from CLOCK_BOOTTIME (:func:`now_s`), which does not jump, and counts
while a machine sleeps. The two clocks are never compared.

[Note: leases]
A lease lasts L seconds. A launcher sends a *beat* four times in L/2; the coordinator answers each.

    launcher     at s1 sends beat k         the lease that k will give begins at s1
    coordinator  at r  gets beat k          it will not drop this host before r + L
    launcher     at a  gets the answer      its ranks may go on until s1 + L/2

1. s1 is before r in real time: a message arrives after it was sent.
2. The launcher kills its ranks when s1 + L/2 is over, for the latest beat that was answered. Ranks
   read the same moment from a file, and end by themselves shortly after it: then the launcher may
   be stopped, and they stop all the same.
3. The coordinator drops the host when r' + L is over, r' being the latest beat that it *got*. Every
   answered beat was got, so r' is not before r.
4. So from the last moment at which ranks may run until they are dropped there are L/2 seconds, less
   what the clocks' rates differ by (seconds differ by less than one in a thousand). In that time
   the signals must have done their work. Only after the drop is the next epoch decided.
5. A host that was dropped gets no answer any more. It connects anew, with no ranks.

The coordinator's own host has no lease, on neither side: no link to it can be cut. Its launcher may
stand still as long as it likes (Ctrl-Z, an output that nobody reads, a machine that sleeps). If it
ends, the kernel ends its ranks and the coordinator with it.

The coordinator may die. Who tries to connect and is *refused* knows that its host is reachable, and
that nobody listened there at a moment after the attempt began, at s. A coordinator that starts
later does not drop anybody before it has run for L: it was not there at s, so that is after s + L.
So a refusal is worth as much as an answer: s takes the place of s1. Training goes on however long
the coordinator is away. Silence is worth nothing: the link may be cut. Nor is somebody who listens
there and does not know the key. It must be the first host that refuses: a firewall that refuses in
its name (REJECT, where DROP would be silent) undoes the proof.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

BEATS = 8
"""In the time of a lease."""
FIRST_HOST = 0
"""The coordinator's own, which has no lease."""


def now_s() -> float:
    """The moment, on a clock that does not stand still while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass
class HostLease:
    """How long this host's ranks may go on: [Note: leases].

    Attributes:
        lease_s: L.
        until_s: When its ranks stop; None before the first beat was answered.
    """

    lease_s: float
    until_s: float | None = None
    _sent: dict[int, float] = field(default_factory=dict)
    _next: int = 0
    _next_beat_s: float = 0.0
    _unanswered_since_s: float | None = None
    _looked_s: float = 0.0
    _awake_since_s: float = 0.0

    def look(self, at_s: float) -> None:
        """This process runs. If it stood still, answers may be there that it has not read yet."""
        if at_s - self._looked_s > self.lease_s / 4:
            self._awake_since_s = at_s
        self._looked_s = at_s

    def is_beat_due(self, at_s: float) -> bool:
        """Whether the next beat should be sent."""
        return at_s >= self._next_beat_s

    def until_beat_s(self, at_s: float) -> float:
        """Seconds until then."""
        return max(0.0, self._next_beat_s - at_s)

    def beat(self, at_s: float) -> int:
        """Number a beat that is sent now; ``at_s`` was read before it is sent."""
        number, self._next = self._next, self._next + 1
        self._sent[number] = at_s
        self._next_beat_s = at_s + self.lease_s / BEATS
        if self._unanswered_since_s is None:
            self._unanswered_since_s = at_s
        return number

    def answered(self, number: int) -> None:
        """The coordinator has answered a beat."""
        sent_s = self._sent.get(number)
        if sent_s is not None:
            self._extend(sent_s)
            self._sent = {n: s for n, s in self._sent.items() if n > number}
            self._unanswered_since_s = min(self._sent.values(), default=None)

    def refused(self, began_s: float) -> None:
        """An attempt to connect that began then was refused: nobody listens there."""
        if self.until_s is not None:
            self._extend(began_s)

    def _extend(self, from_s: float) -> None:
        self.until_s = max(self.until_s or 0.0, from_s + self.lease_s / 2)

    def lost(self) -> None:
        """The connection is gone; what was not answered never will be."""
        self._sent, self._unanswered_since_s = {}, None
        self._next_beat_s = 0.0

    def is_over(self, at_s: float) -> bool:
        """Whether ranks must stop."""
        return self.until_s is not None and at_s >= self.until_s

    def left_s(self, at_s: float) -> float | None:
        """Seconds until then; None if there is no lease yet."""
        return None if self.until_s is None else max(0.0, self.until_s - at_s)

    def silent_s(self, at_s: float) -> float:
        """For how long a beat has been waiting for its answer while this process ran."""
        since_s = self._unanswered_since_s
        return 0.0 if since_s is None else at_s - max(since_s, self._awake_since_s)


@dataclass
class LeaseTable:
    """When the coordinator may go on without which host: [Note: leases].

    Attributes:
        lease_s: L.
        began_s: When this coordinator started.
    """

    lease_s: float
    began_s: float
    _heard_s: dict[int, float] = field(default_factory=dict)

    def heard(self, host: int, at_s: float) -> None:
        """A beat, or its first message, has come from a host."""
        if host != FIRST_HOST:
            self._heard_s[host] = at_s

    def forget(self, host: int) -> None:
        """It is not a host of this job any more, or was dropped."""
        self._heard_s.pop(host, None)

    def over(self, at_s: float) -> list[int]:
        """Hosts to drop now."""
        return [h for h, heard_s in self._heard_s.items() if at_s >= heard_s + self.lease_s]

    def has_waited(self, at_s: float) -> bool:
        """Whether ranks that a coordinator before this one knew have reported or are stopped."""
        return at_s >= self.began_s + self.lease_s

    def next_due_s(self, at_s: float) -> float:
        """When to look again."""
        dues = [heard_s + self.lease_s for heard_s in self._heard_s.values()]
        if not self.has_waited(at_s):
            dues.append(self.began_s + self.lease_s)
        return min(dues, default=at_s + self.lease_s)
