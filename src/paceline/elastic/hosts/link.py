"""A launcher's end of the conversation with the coordinator, over as many connections as it takes.

Used by :mod:`paceline.elastic.hosts.agent`, in the launcher's thread. Knows connections, numbers of
messages and the lease; not what the messages mean.
"""

from __future__ import annotations

import contextlib
import os
import selectors
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Protocol

from paceline.elastic.handshake import limit_waits
from paceline.elastic.hosts.connector import Connector
from paceline.elastic.hosts.lease import HostLease, now_s
from paceline.elastic.hosts.mailbox import Mailbox
from paceline.elastic.hosts.numbered_messages import NumberedMessages
from paceline.elastic.protocol import receive, send
from paceline.errors import MembershipError


class LinkOwner(Protocol):
    """Who talks over a link."""

    def hello(self) -> dict[str, Any]:
        """What to say of this host, and of all its members as they are now."""

    def on_welcome(self, message: dict[str, Any]) -> None:
        """The coordinator is there, and will hear what is said."""

    def on_away(self) -> None:
        """It is not there any more."""

    def on_order(self, message: dict[str, Any]) -> None:
        """It wants something."""

    def on_refused(self, why: str) -> None:
        """It does not want this host."""

    def on_beat(self) -> None:
        """It is time for a beat, and for what is said from time to time."""


@dataclass(frozen=True)
class LinkPlan:
    """Where the coordinator is.

    Attributes:
        address: A path, or a host and a port.
        lease_s: [Note: leases].
        is_leased: Whether this host has one; the coordinator's own has not.
    """

    address: str | tuple[str, int]
    key: bytes = field(repr=False)
    lease_s: float
    is_leased: bool


class CoordinatorLink:
    """See the module.

    Attributes:
        lease: Of this host.
        is_welcome: The coordinator is there.
    """

    def __init__(
        self, plan: LinkPlan, owner: LinkOwner, mailbox: Mailbox, selector: selectors.BaseSelector
    ) -> None:
        self.lease = HostLease(plan.lease_s)
        self.is_welcome = False
        self._plan, self._owner, self._selector = plan, owner, selector
        self._launcher = os.urandom(8).hex()
        self._coordinator = ""
        self._messages = NumberedMessages()
        self._pipe: Connection | None = None
        self._later: list[tuple[str, dict[str, Any]]] = []
        self._away_since_s = now_s()
        self._connector = Connector(
            plan.address,
            plan.key,
            plan.lease_s / 4,
            lambda pipe: mailbox.post(partial(self._on_connected, pipe)),
            lambda began_s: mailbox.post(partial(self.lease.refused, began_s)),
            lambda why: mailbox.post(partial(self._on_stranger, why)),
        )
        self._connector.start()

    # --- said by the owner ------------------------------------------------------------------------
    def say(self, kind: str, **facts: Any) -> None:
        """Say something that must arrive, now or when the coordinator is back."""
        if self._pipe is not None and not self.is_welcome:
            self._later.append((kind, facts))  # not part of the report that was sent
        else:
            message = self._messages.say(kind, **facts)
            if self.is_welcome:
                self._send(message)

    def tick(self) -> None:
        """Send a beat if it is time."""
        at_s = now_s()
        self.lease.look(at_s)
        if self.is_welcome and self.lease.is_beat_due(at_s):
            self._owner.on_beat()
            facts = {"beat": self.lease.beat(at_s), "heard": self._messages.heard}
            self._send({"kind": "alive", **facts})

    def until_next_s(self) -> float | None:
        """Seconds until :meth:`tick` has something to do; None for never."""
        return self.lease.until_beat_s(now_s()) if self.is_welcome else None

    @property
    def away_s(self) -> float:
        """For how long the coordinator has not been there."""
        return 0.0 if self.is_welcome else now_s() - self._away_since_s

    def has_said_all(self) -> bool:
        """Whether the coordinator has heard all that was said."""
        return not self._messages.unheard() and not self._later

    # --- connections ------------------------------------------------------------------------------
    def _on_connected(self, pipe: Connection) -> None:
        limit_waits(pipe, self._plan.lease_s / 4)
        self._pipe = pipe
        self._selector.register(pipe, selectors.EVENT_READ, self._listen)
        hello = self._owner.hello()
        hello |= {"launcher": self._launcher, "coordinator": self._coordinator}
        self._send({"kind": "host", "heard": self._messages.heard, **hello})

    def _on_stranger(self, why: str) -> None:
        """Who listens there does not know the key.

        At first that is a mistake. Later somebody has taken the port while no coordinator was
        there; that is worth as little as silence, and one that comes back is waited for.
        """
        if not self._coordinator:
            self._owner.on_refused(why)

    def _listen(self) -> None:
        assert self._pipe is not None
        try:
            message = receive(self._pipe)
            is_new = self._messages.take(message)
        except (EOFError, OSError, MembershipError):
            self._lose()
            return
        if message["kind"] == "welcome":
            self._on_welcome(message)
        elif message["kind"] == "refused":
            if message["is_final"]:
                self._owner.on_refused(str(message["why"]))
            self._lose(is_soon=False)
        elif message["kind"] == "granted":
            self.lease.answered(int(message["beat"]))
        elif is_new:
            self._owner.on_order(message)

    def _on_welcome(self, message: dict[str, Any]) -> None:
        self._coordinator = str(message["coordinator"])
        self.is_welcome = True
        if message["is_known"]:
            self._messages.confirm(int(message["heard"]))
            for each in self._messages.unheard():
                self._send(each)
        else:  # it has got a report, and nothing that was said to another coordinator
            unheard, self._messages = self._messages.unheard(), NumberedMessages()
            self._later = [
                (str(m["kind"]), m) for m in unheard if _is_not_in_report(m)
            ] + self._later
        self._owner.on_welcome(message)
        later, self._later = self._later, []
        for kind, facts in later:
            self.say(kind, **{name: facts[name] for name in facts if name not in ("kind", "n")})
        self.tick()

    def _send(self, message: dict[str, Any]) -> None:
        if self._pipe is not None:
            try:
                send(self._pipe, **message)
            except OSError:
                self._lose()

    def _lose(self, *, is_soon: bool = True) -> None:
        """The connection is gone: try to get another."""
        if self._pipe is None:
            return
        self._hang_up()
        later, self._later = self._later, []
        for kind, facts in later:
            self._messages.say(kind, **facts)
        if self.is_welcome:
            self.is_welcome, self._away_since_s = False, now_s()
            self._owner.on_away()
        self._connector.start(is_soon=is_soon)

    def _hang_up(self) -> None:
        if self._pipe is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._pipe)
            self._pipe.close()
            self._pipe = None
        self.lease.lost()

    def close(self) -> None:
        """Hang up for good."""
        self._connector.close()
        self._hang_up()


def _is_not_in_report(message: dict[str, Any]) -> bool:
    """Whether a new coordinator has to be told what the one before it did not confirm."""
    if message["kind"] == "from":
        return message["message"].get("kind") in ("broken", "entered")
    return message["kind"] in ("scale", "leaving", "stop", "finished")
