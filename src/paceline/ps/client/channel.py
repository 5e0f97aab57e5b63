"""One server, from the trainer's side: a DEALER socket, deadlines, and errors that name it.

Called by ``ps/client/connection.py`` and ``ps/client/batch_exchange.py``. What is sent again and
what is believed is decided by ``ps/client/ledger.py``; how a message travels is in
``ps/client/link.py``. Must not know what a message means.

There is no thread of ours: ZeroMQ's own one receives, and replies wait in its queue until somebody
waits for one. A lock makes a channel usable from several threads (autograd may run a backward on
another one); it is given back at least every ``_SLICE_MS``.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from paceline.errors import (
    ServerKeyError,
    ServerLostError,
    ServerRefusedError,
    ServersClosedError,
)
from paceline.forks import tell_children
from paceline.ps.client.ledger import Ledger, LedgerState, OpenRequest
from paceline.ps.client.link import Link, LinkEvent
from paceline.ps.client.refused_pushes import Refused, describe
from paceline.ps.client.server_name import ServerName
from paceline.ps.protocol.wire import Frame, WireError, is_error

log = logging.getLogger("paceline.ps")


@dataclass(frozen=True)
class ChannelLimits:
    """How long a trainer waits for a server, and how much it keeps for it.

    Args:
        timeout_s: Then it is an error.
        warn_s: Then there is a line in the log, once.
        hello_s: How long after its last sign of life a server is asked what it has.
        kept_bytes: So many bytes of pushes may be unacknowledged; a further one waits.
    """

    timeout_s: float = 120.0
    warn_s: float = 5.0
    hello_s: float = 1.0
    kept_bytes: int = 256 << 20


_LAST_ANSWERS_S = 0.5
"""How long to wait for acknowledgements when a connection is closed without a flush."""
_NO_ENTRY = {
    LinkEvent.REFUSED: "does not accept this trainer's key: ps.connect(..., keys=DIR) takes a "
    "directory made by `paceline ps keys`",
    LinkEvent.UNREADABLE: "ends every handshake: the key does not fit. keys=DIR has the key of "
    "another server (DIR/server.pub), or this server has new keys: copy the client's directory "
    "again",
    LinkEvent.FOREIGN: "belongs to another user of this host, who may have taken its place: over "
    "ipc a server and its trainers are of one user; others need tcp and a key (`paceline ps keys`)",
}


class Channel:
    """The connection to one server.

    Args:
        index: Of the server, among those of this trainer.
        link: Its socket.
        client: 16 random bytes, the same for all servers of one ``Servers``.
        limits: How long to wait.

    Attributes:
        server: Its name in errors.
        names: Of tables, by their numbers on the server, for errors.
    """

    def __init__(self, index: int, link: Link, client: bytes, limits: ChannelLimits) -> None:
        self.server = ServerName(index, link.address)
        self._link = link
        self._limits = limits
        self._ledger = Ledger(client)
        self._lock = threading.RLock()
        self._owner = os.getpid()
        self._is_closed = False
        self._heard_s = self._asked_s = time.monotonic()
        self.sent_bytes = self.received_bytes = 0
        self.names: dict[int, str] = {}
        tell_children(self)

    def let_go(self) -> None:
        """In a forked child: nothing can be sent there, and the server must see the trainer end."""
        self._lock = threading.RLock()  # it may be held by a thread that is not here
        self._link.let_go()

    @property
    def route(self) -> str:
        """How data travel to this server: ``"shared memory"``, ``"ipc"`` or ``"tcp"``."""
        return self._link.route

    def open(self) -> None:
        """Send HELLO; ``wait_open`` waits for the reply."""
        with self._lock:
            self._send_hello()

    def wait_open(self) -> None:
        """Wait until the server has replied for the first time."""
        self._wait_until(lambda: self._ledger.state is not LedgerState.MEETING, "the first answer")
        with self._lock:
            if self._ledger.is_idle:
                self._link.use_shm(self._ledger.incarnation)

    def post(self, pending: OpenRequest) -> OpenRequest:
        """Send a request; ``wait`` gets its reply. Waits only if too much is kept."""
        ledger, limit = self._ledger, self._limits.kept_bytes
        if ledger.kept_bytes > limit:
            self._wait_until(lambda: ledger.kept_bytes <= limit, pending.what)
        with self._lock:
            self._check_usable(pending.what)
            self._check_size(pending)
            if ledger.is_idle:
                self._link.use_shm(self._ledger.incarnation)
            self._send(ledger.enter(pending))
        return pending

    def hold(self, is_held: bool) -> None:
        """Say that more requests follow at once, so that the server need not wake for each."""
        with self._lock:
            if not self._is_closed and os.getpid() == self._owner:
                self._link.hold(is_held)

    def wait(self, pending: OpenRequest, timeout_s: float | None = None) -> list[Frame]:
        """Wait for a request's answer.

        Raises:
            ServerLostError: No answer before the deadline, or the server lost its state.
            ServerRefusedError: It answered with an error.
        """
        self._wait_until(lambda: pending.is_done, pending.what, timeout_s)
        frames, pending.reply = pending.reply, None
        if frames is None:  # struck off: it was applied before the server was killed
            return []
        if is_error(frames[0]):
            raise self.server.refused(pending.what, frames[0])
        return frames

    def abandon(self, pending: OpenRequest) -> None:
        """Do not wait for a request any more."""
        with self._lock:
            self._ledger.abandon(pending)

    def take_refused(self) -> Refused | None:
        """Pushes that the server refused, as far as its answers are here; each is told once."""
        ledger = self._ledger
        if not ledger.kept_bytes and not ledger.refused.pushes:
            return None  # everything is answered, and well
        with self._lock:
            if not self._is_usable:  # the call that follows says so
                return None
            while ledger.kept_bytes and self._receive(is_waiting=False):
                pass
            return ledger.take_refused()

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until everything that changes a table is acknowledged."""
        self._wait_until(lambda: not self._ledger.has_open(sequenced=True), "flush", timeout_s)

    def close(self) -> None:
        """Let go of the socket. What is not acknowledged may be lost; ``flush`` comes first.

        Then nobody can be told any more what became of pushes, but by the log.
        """
        with self._lock:
            if self._is_usable:
                self._report_unfinished()
                self._is_closed = True
                self._link.close()

    @property
    def _is_usable(self) -> bool:
        return not self._is_closed and os.getpid() == self._owner

    def _report_unfinished(self) -> None:
        until_s = time.monotonic() + _LAST_ANSWERS_S
        while self._ledger.kept_bytes and time.monotonic() < until_s:
            if not self._receive():
                self._link.take_event()
        refused = self._ledger.take_refused()
        if refused is not None:
            log.error("%s. These gradients are not in the tables", describe(self, refused))
        if self._ledger.kept_bytes:
            log.warning(
                "%s has not acknowledged the last pushes of this trainer: they may be lost. Call "
                "flush() or close() before the program ends",
                self.server,
            )

    def _wait_until(
        self, is_met: Callable[[], bool], what: str, timeout_s: float | None = None
    ) -> None:
        start_s = warned_s = time.monotonic()
        timeout_s = self._limits.timeout_s if timeout_s is None else timeout_s
        while True:
            with self._lock:
                if is_met():
                    return
                self._check_usable(what)
                if self._receive():
                    continue
                self._check_connection()
            waited_s = time.monotonic() - start_s
            if waited_s > timeout_s:
                raise self._too_late(what, timeout_s)
            if warned_s == start_s and waited_s > self._limits.warn_s:
                warned_s = time.monotonic()
                why = self._link.obstacle().text
                log.warning(
                    "waiting for %s since %.0f s: %s; giving up after %g s%s",
                    *(self.server, waited_s, what, timeout_s, f"; {why}" if why else ""),
                )

    def _receive(self, is_waiting: bool = True) -> bool:
        """Take one message, if there is one, now or within a slice of time."""
        frames = self._link.receive() if is_waiting else self._link.receive_now()
        if frames is None:
            return False
        if not self._link.came_by_shm:
            # A broken connection is always reported before what comes over the next one.
            self._handle_event(self._link.take_event())
        self._heard_s = time.monotonic()
        self.received_bytes += sum(map(len, frames))
        try:
            messages = self._ledger.take(frames)
        except (WireError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("%s: unreadable reply: %s", self.server, error)
            messages = [self._ledger.hello()] if self._ledger.doubt() else []
        for message in messages:
            self._send(message)
        return True

    def _check_connection(self) -> None:
        """Nothing came for a slice of time: was the connection lost, does the server live?"""
        self._handle_event(self._link.take_event())
        now_s = time.monotonic()
        if now_s - max(self._heard_s, self._asked_s) > self._limits.hello_s:
            obstacle = self._link.obstacle()
            if obstacle.is_final:  # do not wait for somebody who will never let us in
                raise self._no_entry(f": {obstacle.text}")
            self._send_hello()

    def _handle_event(self, event: LinkEvent) -> None:
        if event in _NO_ENTRY:
            raise self._no_entry(f" {_NO_ENTRY[event]}")
        if event is LinkEvent.BROKEN and self._ledger.state is not LedgerState.MEETING:
            self._ledger.doubt()
            self._send_hello()

    def _no_entry(self, why: str) -> ServerKeyError:
        return self.server.error(ServerKeyError, "connect", f"{self.server}{why}")

    def _send_hello(self) -> None:
        self._asked_s = time.monotonic()
        self._send(self._ledger.hello())

    def _send(self, message: list[Frame]) -> None:
        self.sent_bytes += sum(map(len, message))
        self._link.send(message)

    def _check_usable(self, what: str) -> None:
        server, ledger = self.server, self._ledger
        if os.getpid() != self._owner:
            text = (
                f"{what}: this connection to server {server.index} belongs to process "
                f"{self._owner}, and this is a forked child ({os.getpid()}): call ps.connect in "
                "the child"
            )
            raise server.error(ServersClosedError, what, text)
        if self._is_closed:
            text = f"{what}: the connection to {server} is closed"
            raise server.error(ServersClosedError, what, text)
        if ledger.state is LedgerState.LOST:
            text = (
                f"{what}: {server} came back without its state: pushes that it had acknowledged "
                "are gone. Load the last save on a new connection; a server started with --dir "
                "keeps its state"
            )
            raise server.error(ServerLostError, what, text)
        if ledger.complaint and ledger.state is LedgerState.MEETING:
            text = f"{server} does not understand this trainer: {ledger.complaint}"
            raise server.error(ServerRefusedError, what, text, code="wire")

    def _check_size(self, pending: OpenRequest) -> None:
        """Refuse what would only make the server hang up."""
        most, what = self._ledger.max_message_bytes, pending.what
        size = max(map(len, pending.arrays), default=0)
        if most is not None and size > most:
            text = (
                f"{self.server} takes messages of up to {most} bytes (--max-message-bytes), and "
                f"a {what} has {size}: raise the limit, or use smaller batches. Nothing was sent "
                "to it"
            )
            raise self.server.error(ServerRefusedError, what, text, code="size")

    def _too_late(self, what: str, timeout_s: float) -> ServerLostError:
        remedy = self._link.obstacle().text
        if not remedy and self._ledger.state is LedgerState.MEETING:
            remedy = "is there a server at this address?"
        elif not remedy:
            remedy = "it must be started again with --dir"
        text = f"{what}: no answer from {self.server} within {timeout_s:g} s; {remedy}"
        return self.server.error(ServerLostError, what, text)
