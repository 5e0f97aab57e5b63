"""What a trainer has asked one server for, and what came back. Pure: no socket, no clock.

``ps/client/channel.py`` sends what this ledger says and hands it what arrives. Here is the client's
half of the protocol of ``docs/decisions/0007-parameter-servers.md``; the server's half is its
store.

[Note: why nothing is lost, doubled or seen too early]
Facts: (a) ZeroMQ delivers what is sent over *one* connection in order, or not at all, and the
server answers in that order, SAVE and STAGE excepted. (b) A connection may break at any time and is
made anew behind our back; messages and replies on their way are lost then, and queued ones follow
over the new one. (c) The server applies number ``applied + 1`` and no other, and keeps ``applied``
with its tables.

1. *Requests are numbered in the order of sending, and a message that is sent again gets a new
   number.* So a reply to an old number is nobody's, and is dropped.
2. *A reply is believed only if it answers the oldest open request.* If one was skipped, by (a) a
   connection broke in between. A lookup that overtook a lost push would show rows without it.
3. *Whoever doubts says HELLO, and believes no lookup until its WELCOME.* What was sent before that
   HELLO and is not answered when WELCOME comes has been lost, by (a), or its reply has. Pushes up
   to ``applied`` are struck off, the others are sent again in order, then the lookups. By (c) a
   push of which both copies arrive counts once, and one that overtakes a lost one is refused
   (``gap``), which is a reason to doubt. If a push was lost, requests that were
   sent after the HELLO are sent again as well, behind it: their first copies do not see the push.
4. *Acknowledged means applied for good.* A WELCOME whose ``applied`` is smaller than what was
   acknowledged comes from a server without its state. Every table costs a client one sequenced
   message (ATTACH), so whoever has used a table notices.
5. *A broken connection is a reason to doubt* even if nothing was skipped: somebody else may have
   made new tables on a server that came back empty.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.ps.client.refused_pushes import Refused
from paceline.ps.protocol.wire import (
    DEFERRED,
    SEQUENCED,
    Frame,
    Head,
    Kind,
    control_of,
    is_error,
    pack_control,
    pack_head,
    read_head,
)


class LedgerState(enum.Enum):
    """How a trainer stands with one server."""

    MEETING = "meeting"
    """From the start to the first WELCOME."""
    OPEN = "open"
    """Replies are believed. Left by a doubt."""
    DOUBTING = "doubting"
    """Something may be lost: replies to lookups are not believed. Left by WELCOME."""
    LOST = "lost"
    """The server came back without its state. For good."""


@dataclass(slots=True, eq=False)
class OpenRequest:
    """One request, kept until it is answered.

    Args:
        kind: What it is.
        what: The same for people, in an error: ``"lookup of 3 tables"``.
        tail: What follows the head in the first frame: records, or JSON.
        sections: How many records.
        arrays: The other frames: bytes, or views of bytes.
    """

    kind: Kind
    what: str
    tail: bytes
    sections: int = 0
    arrays: tuple[Frame, ...] = ()
    request: int = 0
    sequence: int = 0
    reply: list[Frame] | None = None
    is_done: bool = False
    is_wanted: bool = True
    was_doubted: bool = False
    kept_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        """What keeping it costs."""
        return len(self.tail) + sum(map(len, self.arrays))


class Ledger:
    """One client's open requests to one server.

    Args:
        client: 16 random bytes.

    Attributes:
        state: See :class:`LedgerState`.
        acknowledged: The highest number that is known to be applied.
        kept_bytes: Of sequenced messages that are not acknowledged.
        max_message_bytes: What the server takes in one frame; None: it did not say.
        refused: Pushes that the server refused; see ``ps/client/refused_pushes.py``.
        complaint: What the server said about a message that it could not even read.
    """

    def __init__(self, client: bytes) -> None:
        self.state = LedgerState.MEETING
        self.acknowledged = 0
        self.kept_bytes = 0
        self.complaint = ""
        self.incarnation: str | None = None
        self.max_message_bytes: int | None = None
        self.refused = Refused()
        self._told = 0  # how many refusals of what changes something have come here
        self._client = client
        self._open: dict[int, OpenRequest] = {}
        self._requests = 0
        self._sequence = 0
        self._hello = self._welcomed = 0

    @property
    def is_idle(self) -> bool:
        """Say whether everything that was asked has been answered, HELLO included."""
        is_welcome = self._welcomed == self._hello
        return not self._open and is_welcome and self.state is LedgerState.OPEN

    def enter(self, pending: OpenRequest) -> list[Frame]:
        """Note a new request, and give the message to send."""
        if pending.kind in SEQUENCED:
            self._sequence += 1
            pending.sequence = self._sequence
            pending.kept_bytes = pending.size_bytes
            self.kept_bytes += pending.kept_bytes
        return self._number(pending)

    def hello(self) -> list[Frame]:
        """Ask the server what it has; the answer ends every doubt about what was sent so far."""
        self._requests += 1
        self._hello = self._requests
        head = Head(Kind.HELLO, self._hello, self._client)
        return pack_control(head, {"nonce": self._hello})

    def doubt(self) -> bool:
        """Believe no lookup until the next WELCOME; say whether that is new."""
        if self.state is not LedgerState.OPEN:
            return False
        self.state = LedgerState.DOUBTING
        return True

    def abandon(self, pending: OpenRequest) -> None:
        """Nobody waits for the reply any more. It is dropped when it comes."""
        pending.is_wanted = False
        pending.reply = None

    def take_refused(self) -> Refused | None:
        """The pushes that were refused since the last call."""
        if not self.refused.pushes:
            return None
        found, self.refused = self.refused, Refused()
        return found

    def has_open(self, *, sequenced: bool) -> bool:
        """Say whether requests are open: all, or only those that change something."""
        return any(each.sequence or not sequenced for each in self._open.values())

    def take(self, frames: list[Frame]) -> list[list[Frame]]:
        """Take what arrived; give the messages that must be sent now.

        Raises:
            WireError: It is no message.
        """
        kind, request = read_head(frames[0])[0][:2]
        if kind is Kind.WELCOME:
            return self._welcome(control_of(frames[0]))
        pending = self._open.get(request)
        if pending is None:
            if kind is Kind.ERROR and request == 0:
                self.complaint = str(control_of(frames[0]).get("text"))
            return []
        is_next = self._is_next(pending)
        code = control_of(frames[0]).get("code") if kind is Kind.ERROR else None
        if not self._is_believed(pending, code, is_next):
            return [self.hello()] if self.doubt() else []
        self._finish(pending, frames)
        return [self.hello()] if not is_next and self.doubt() else []

    def _is_believed(self, pending: OpenRequest, code: str | None, is_next: bool) -> bool:
        if pending.sequence:  # refused or applied: either way its number counts
            return code != "gap"
        if code == "table" and not pending.was_doubted:
            pending.was_doubted = True  # perhaps it has lost its tables: WELCOME tells
            return False
        return is_next and self.state is LedgerState.OPEN

    def _is_next(self, pending: OpenRequest) -> bool:
        if pending.kind in DEFERRED:
            return True
        for each in self._open.values():
            if each.kind not in DEFERRED:
                return each is pending
        return False

    def _finish(self, pending: OpenRequest, reply: list[Frame] | None) -> None:
        del self._open[pending.request]
        if pending.sequence and reply is not None and is_error(reply[0]):
            self._told += 1
            if pending.kind is Kind.PUSH:
                self.refused.add(pending, control_of(reply[0]))
        if pending.sequence:
            self.acknowledged = max(self.acknowledged, pending.sequence)
            self.kept_bytes -= pending.kept_bytes
        pending.reply = reply if pending.is_wanted else None
        pending.arrays = ()
        pending.is_done = True

    def _welcome(self, control: Mapping[str, Any]) -> list[list[Frame]]:
        if control.get("nonce") != self._hello:
            return []
        applied = int(control["applied"])
        if applied < self.acknowledged:
            self.state = LedgerState.LOST
            return []
        is_same = control["incarnation"] == self.incarnation
        self.incarnation = str(control["incarnation"])
        self.max_message_bytes = control.get("max_message_bytes")
        self.state = LedgerState.OPEN
        self._welcomed = self._hello
        asked = [each for each in self._open.values() if not (is_same and each.kind in DEFERRED)]
        lost = [each for each in asked if each.request < self._hello]
        if any(each.sequence > applied for each in lost):
            lost = asked  # what was sent after HELLO would be answered before what is sent now
        refusals = {int(number): reason for number, reason in control.get("refusals", ())}
        messages = self._repeat(lost, applied, refusals)
        unheard = sum(0 < each.sequence <= applied for each in self._open.values())
        unknown = int(control.get("refused", 0)) - self._told - unheard
        if unknown > 0:  # [Note: no refusal is missed]
            self._told += unknown
            self.refused.add_unknown(unknown)
        return messages

    def _repeat(
        self, lost: list[OpenRequest], applied: int, refusals: Mapping[int, Mapping[str, Any]]
    ) -> list[list[Frame]]:
        """Strike off what is applied or refused; number the rest anew, changes first."""
        messages = []
        for pending in sorted(lost, key=lambda each: (not each.sequence, each.request)):
            is_applied = 0 < pending.sequence <= applied
            if (is_applied and pending.kind in _NO_ANSWER) or not (
                pending.is_wanted or pending.sequence
            ):
                self._finish(pending, self._refusal(pending, refusals))
                continue
            del self._open[pending.request]
            messages.append(self._number(pending))
        self.acknowledged = max(self.acknowledged, applied)
        return messages

    def _refusal(
        self, pending: OpenRequest, refusals: Mapping[int, Mapping[str, Any]]
    ) -> list[Frame] | None:
        """The reply that was lost, if it was no DONE."""
        reason = refusals.get(pending.sequence)
        if not pending.sequence or reason is None:
            return None
        return pack_control(Head(Kind.ERROR, pending.request, self._client), reason)

    def _number(self, pending: OpenRequest) -> list[Frame]:
        self._requests += 1
        pending.request = self._requests
        self._open[pending.request] = pending
        head = Head(pending.kind, pending.request, self._client, pending.sequence)
        return [pack_head(head, pending.sections) + pending.tail, *pending.arrays]


# Applied is all that a trainer wants to know of these; the others' replies say something.
_NO_ANSWER = frozenset({Kind.PUSH, Kind.WRITE})
