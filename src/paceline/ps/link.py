"""The socket to one server, and what ZeroMQ tells about its connection. Called by a channel.

Must not know what is in a message. Messages are copied into ZeroMQ's memory when they are sent:
sending without a copy would start a thread of pyzmq's that frees the memory. What arrives is not
copied.
"""

from __future__ import annotations

import enum
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from paceline.ps.wire import Frame

_SLICE_MS = 50
"""A receive returns after so long, with or without a message."""
_RECONNECT_MS, _RECONNECT_MAX_MS = 20, 500
_EVENTS = (
    zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


class News(enum.Enum):
    """What happened to the connection since somebody last asked."""

    NOTHING = "nothing"
    BROKEN = "broken"
    """It broke; ZeroMQ makes a new one."""
    REFUSED = "refused"
    """The server does not accept our key."""


class Link:
    """A DEALER socket.

    Args:
        context: Whoever made it ends it.
        address: Of the server.
        curve: Key options of the socket (``curve_publickey``, ...), empty without encryption.
    """

    def __init__(self, context: Any, address: str, curve: dict[str, bytes]) -> None:
        self.address = address
        self._socket = context.socket(zmq.DEALER)
        for name, value in {**_OPTIONS, **curve}.items():
            setattr(self._socket, name, value)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._socket.connect(address)

    def send(self, frames: list[Frame]) -> None:
        """Queue a message; never waits."""
        self._socket.send_multipart(frames)

    def receive(self) -> list[Frame] | None:
        """One message, or None after a short while."""
        try:
            return [frame.buffer for frame in self._socket.recv_multipart(copy=False)]
        except zmq.Again:
            return None

    def news(self) -> News:
        """The worst that happened since the last call."""
        found = News.NOTHING
        while self._monitor.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            event = recv_monitor_message(self._monitor)["event"]
            if event != zmq.EVENT_DISCONNECTED:
                return News.REFUSED
            found = News.BROKEN
        return found

    def close(self) -> None:
        """Close both sockets; what is still queued gets a moment."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=_LINGER_MS)


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
