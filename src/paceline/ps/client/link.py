"""The way to one server: a ZeroMQ socket, and on the same host shared memory. Called by a channel.

Must not know what is in a message. Messages are copied into ZeroMQ's memory when they are sent:
sending without a copy would start a thread of pyzmq's that frees the memory. What arrives is not
copied.

[Note: two ways, one order]
Data messages take shared memory (``ps/client/shm_link.py``) if it is there and they fit; everything
else goes over ZeroMQ. The ledger needs one order for both, so:

- *Requests.* Once a message went over ZeroMQ, the following ones do too, until nothing is under way
  (``use_shm``). Before the server handles a message that came over ZeroMQ, it handles all that
  this trainer has put into the shared memory, which is there by then.
- *Replies.* A request is answered the way it came. So those that come by shared memory are older
  than those that come over ZeroMQ, and are taken first. A reply that is too large for the shared
  memory leaves a mark there; then the next message over ZeroMQ is that reply.
- *Shared memory that breaks* is a broken connection: what was in it is lost, or handled before the
  server reads the HELLO that follows.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from paceline.ps.client.peer_credentials import Obstacle, is_own_peer, obstacle_at
from paceline.ps.client.shm_link import ShmLink, open_shm_link
from paceline.ps.protocol.settings import IPC
from paceline.ps.protocol.wire import Frame

_SLICE_MS = 50
"""A receive returns after this long, with or without a message."""
_RECONNECT_MS, _RECONNECT_MAX_MS = 20, 500
_RETRY_S = 5.0
"""How long after a server gave no shared memory it is asked again."""
_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_MOST_FAILURES = 3
"""A server that ends the handshake so often in a row cannot read it: one that is being stopped or
started does so once."""


class LinkEvent(enum.Enum):
    """What happened to the connection since somebody last asked."""

    NOTHING = "nothing"
    BROKEN = "broken"
    """It broke; ZeroMQ makes a new one."""
    REFUSED = "refused"
    """The server does not accept our key."""
    UNREADABLE = "unreadable"
    """It ends every handshake: it cannot read what is encrypted for another server."""
    FOREIGN = "foreign"
    """Another user of this host listens at the address."""


class Link:
    """A DEALER socket, and perhaps shared memory.

    Args:
        context: Whoever made it ends it.
        address: Of the server.
        curve: Key options of the socket (``curve_publickey``, ...), empty without encryption.
        client: Who this trainer is, for the server's listener.

    Attributes:
        came_by_shm: Whether the last message came through shared memory: it is then from the
            same server as all before.
    """

    def __init__(self, context: Any, address: str, curve: dict[str, bytes], client: bytes) -> None:
        self.address = address
        self._client = client
        self._is_encrypted = bool(curve)
        self._failures = 0
        self._shm: ShmLink | None = None
        self._next_try_s = 0.0
        self._is_direct = False  # whether data messages may take shared memory
        self._is_marked = False  # whether the next reply comes over ZeroMQ
        self._is_replaced = False  # whether another server answers, and nobody knows yet
        self.came_by_shm = False
        self._socket = context.socket(zmq.DEALER)
        for name, value in {**_OPTIONS, **curve}.items():
            setattr(self._socket, name, value)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._socket.connect(address)

    @property
    def route(self) -> str:
        """How data messages travel, for people."""
        if self._shm is not None:
            return "shared memory"
        return self.address.partition(":")[0]

    def use_shm(self, incarnation: str | None) -> None:
        """Take shared memory from now on, if there is one: nothing is under way.

        Args:
            incarnation: Of the server that this trainer knows. If another one hands out memory, it
                has taken its place unnoticed so far, and that is an event.
        """
        if self._shm is None and time.monotonic() >= self._next_try_s:
            self._shm = open_shm_link(self.address, self._client)
            self._next_try_s = time.monotonic() + _RETRY_S
            if self._shm is not None and self._shm.incarnation != incarnation:
                self._leave_shm()
                self._is_replaced = True
        self._is_direct = self._shm is not None

    def send(self, frames: list[Frame]) -> None:
        """Queue a message; never waits."""
        if self._is_direct and self._shm is not None:
            if len(frames) > 1 and self._shm.send(frames):
                return
            self._is_direct = False
        self._socket.send_multipart(frames)

    def hold(self, is_held: bool) -> None:
        """Say that more messages follow at once; then, that they have."""
        if self._shm is not None:
            self._shm.is_held = is_held
            if not is_held:
                self._shm.wake()

    def receive(self, timeout_ms: int = _SLICE_MS) -> list[Frame] | None:
        """One message, or None after a short while."""
        shm = self._shm
        if shm is not None and shm.awaited and not self._is_marked:
            frames = shm.receive(timeout_ms)
            self._is_marked = frames == []
            self.came_by_shm = True
            return frames or None
        flags = 0 if timeout_ms else zmq.NOBLOCK  # the socket has its own time-out
        try:
            found = [frame.buffer for frame in self._socket.recv_multipart(flags, copy=False)]
        except zmq.Again:
            return None
        self._is_marked = self.came_by_shm = False
        return found

    def receive_now(self) -> list[Frame] | None:
        """One message, if there is one."""
        return self.receive(0)

    def take_event(self) -> LinkEvent:
        """The worst that happened since the last call."""
        found = LinkEvent.NOTHING
        if self._is_replaced or (self._shm is not None and self._shm.is_broken):
            self._leave_shm()
            self._is_replaced = False
            found = LinkEvent.BROKEN
        while self._monitor.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            what = self._judge(recv_monitor_message(self._monitor))
            if what is LinkEvent.BROKEN:
                self._leave_shm()
            elif what is not LinkEvent.NOTHING:
                return what
            found = what if found is LinkEvent.NOTHING else found
        return found

    def _judge(self, event: Mapping[str, Any]) -> LinkEvent:
        """What one event of the socket means."""
        kind = event["event"]
        if kind == zmq.EVENT_CONNECTED:
            is_ours = not self.address.startswith(IPC) or is_own_peer(event["value"])
            return LinkEvent.NOTHING if is_ours else LinkEvent.FOREIGN
        if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._failures = 0
            return LinkEvent.NOTHING
        if kind == zmq.EVENT_DISCONNECTED:
            return LinkEvent.BROKEN
        if kind == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._failures += 1
            is_hopeless = self._is_encrypted and self._failures >= _MOST_FAILURES
            return LinkEvent.UNREADABLE if is_hopeless else LinkEvent.BROKEN
        return LinkEvent.REFUSED

    def obstacle(self) -> Obstacle:
        """Why there may be no connection, as far as the socket's file tells."""
        return obstacle_at(self.address) if self.address.startswith(IPC) else Obstacle()

    def close(self) -> None:
        """Close both sockets; what is still queued gets a moment."""
        self._leave_shm()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=_LINGER_MS)

    def let_go(self) -> None:
        """In a forked child: close its copy of shared memory. ZeroMQ must not be touched there."""
        if self._shm is not None:
            self._shm.close()

    def _leave_shm(self) -> None:
        self._is_direct = self._is_marked = False
        self._next_try_s = 0.0
        if self._shm is not None:
            self._shm.close()
            self._shm = None


_LINGER_MS = 500
# Nothing is dropped: the channel bounds what is sent, and the server what it answers.
_OPTIONS: dict[str, Any] = {
    "sndhwm": 0,
    "rcvhwm": 0,
    "rcvtimeo": _SLICE_MS,
    "linger": _LINGER_MS,
    "reconnect_ivl": _RECONNECT_MS,
    "reconnect_ivl_max": _RECONNECT_MAX_MS,
}
