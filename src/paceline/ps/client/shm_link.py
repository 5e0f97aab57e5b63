"""The trainer's end of memory that it shares with a server of its host.

Called by ``ps/client/link.py``.

A request that goes in here is answered here, in order; a *mark* says that the next reply is too
large and comes over ZeroMQ. The connection to the server's listener stays open for as long as the
memory is used: when it ends, so has the server.
"""

from __future__ import annotations

import os
import socket
from typing import Any

from paceline.memory.descriptors import close_all, is_same_user, receive
from paceline.ps.protocol.shm_ring import (
    GREETING,
    MAGIC,
    OFFER,
    RingDescriptors,
    is_possible,
    pair_over,
    shm_listener_path,
)
from paceline.ps.protocol.wire import Frame

_OFFER_S = 1.0
"""How long a server may take to hand out memory; a busy one is asked again later."""


class ShmLink:
    """Shared memory with one server.

    Attributes:
        awaited: How many replies will still come this way.
        is_broken: The server has closed its end, or is dead.
        incarnation: Of the server, as in its WELCOME.
        is_held: More requests will follow at once: the server is not woken before.
    """

    def __init__(
        self, connection: socket.socket, pair: Any, events: tuple[int, int], incarnation: str
    ) -> None:
        self.incarnation = incarnation
        self.awaited = 0
        self.is_broken = self.is_held = self._is_waking_due = False
        self._connection = connection
        self._listener = connection.fileno()
        self._pair = pair
        self._events = events

    def send(self, frames: list[Frame]) -> bool:
        """Put a request in; False if it does not fit, now or ever."""
        is_sent: bool
        if self.is_held:
            is_sent = self._pair.put(frames)
            self._is_waking_due |= is_sent
        else:
            is_sent = self._pair.send(frames)
        self.awaited += is_sent
        return is_sent

    def wake(self) -> None:
        """Wake the server, if there is something that it was not woken for."""
        if self._is_waking_due:
            self._is_waking_due = False
            self._pair.wake()

    def receive(self, timeout_ms: int) -> list[Frame] | None:
        """The next reply, ``[]`` for a mark, None after a while or if it is broken."""
        try:
            frames: list[Frame] | None = self._pair.receive()
            if frames is None:
                self.wake()
                has_event = self._pair.wait(self._listener, timeout_ms)
                frames = self._pair.receive()
                self.is_broken = frames is None and has_event
        except ValueError:
            frames, self.is_broken = None, True
        if frames is not None:
            self.awaited -= 1
        return frames

    def close(self) -> None:
        """Give the memory back; the server handles what is still in it. Idempotent."""
        if self._connection.fileno() >= 0:
            self._pair.close()
            self._connection.close()
            for event in self._events:
                os.close(event)


def open_shm_link(address: str, client: bytes) -> ShmLink | None:
    """Ask the server for memory; None if it is elsewhere, has none to give, or is busy."""
    path = shm_listener_path(address)
    if path is None or not is_possible():
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(_OFFER_S)
        connection.connect(os.fspath(path))
        if not is_same_user(connection):
            raise PermissionError(f"{path} is another user's")
        connection.sendall(GREETING.pack(MAGIC, client))
        handed, capacity, incarnation = _receive(connection)
    except OSError:
        connection.close()
        return None
    try:
        pair = pair_over(handed, capacity, is_server=False)
    except (ValueError, OSError):
        connection.close()
        os.close(handed.server_event)
        os.close(handed.trainer_event)
        return None
    finally:
        os.close(handed.memory)
    events = (handed.server_event, handed.trainer_event)
    return ShmLink(connection, pair, events, incarnation)


def _receive(connection: socket.socket) -> tuple[RingDescriptors, int, str]:
    words, descriptors = receive(connection, OFFER.size, len(RingDescriptors._fields))
    if len(words) == OFFER.size and len(descriptors) == len(RingDescriptors._fields):
        magic, capacity, incarnation = OFFER.unpack(words)
        if magic == MAGIC:
            return RingDescriptors(*descriptors), capacity, incarnation.decode("ascii", "replace")
    close_all(descriptors)
    raise ConnectionError("the listener was closed, or speaks another version")
