"""A listening socket of an elastic job: who connects proves that it knows the key, or is refused.

Used by launchers (for their ranks), by the coordinator (for launchers), and by the store's tunnel.
Each newcomer is heard in a thread of its own, for a limited time, and is turned away if too many
others come meanwhile: one that connects and says nothing, or one byte after the other, keeps nobody
else out.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from paceline.elastic.handshake import admit, end_if_silent, set_timeout
from paceline.elastic.protocol import receive
from paceline.errors import MembershipError

logger = logging.getLogger("paceline.elastic")

HEAR_S = 20.0
"""How long a newcomer may take for the handshake and its first message."""
MAX_HEARD = 64
_LOOK_S = 1.0  # for those that take longer
_PAUSE_S = 0.02  # if there are no descriptors or threads to be had

Admit = Callable[[dict[str, Any], Connection], None]


class KeyedListener:
    """Lets newcomers in who know the key.

    Args:
        listener: Bound, and listening.
        key: Of the job.
        admit: Gets the first message of each newcomer, and the connection; called in any thread.
    """

    def __init__(self, listener: socket.socket, key: bytes, admit: Admit) -> None:
        self._key = key
        self._admit = admit
        self._socket = listener
        self._heard: dict[socket.socket, float] = {}  # since when; in the order in which they came
        self._lock = threading.Lock()
        self._warned = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._accept, name="paceline-accept", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                self._socket.settimeout(_LOOK_S if self._heard else None)
                newcomer, _ = self._socket.accept()
            except TimeoutError:
                self._end_late()
            except OSError:  # it is gone already, there is no descriptor left, or this is closed
                if not self._is_closed:
                    time.sleep(_PAUSE_S)
            else:
                self._end_late()
                self._take(newcomer)

    def _end_late(self) -> None:
        """Hang up on those that have taken too long; their threads see that."""
        with self._lock:
            for newcomer, since_s in self._heard.items():
                if time.monotonic() > since_s + HEAR_S:
                    _hang_up(newcomer)

    def _take(self, newcomer: socket.socket) -> None:
        with self._lock:
            if len(self._heard) >= MAX_HEARD:
                oldest = next(iter(self._heard))
                del self._heard[oldest]
                _hang_up(oldest)
            self._heard[newcomer] = time.monotonic()
        try:
            threading.Thread(target=self._hear, args=(newcomer,), daemon=True).start()
        except RuntimeError:  # the system has no more
            with self._lock:
                self._heard.pop(newcomer, None)
            newcomer.close()
            time.sleep(_PAUSE_S)

    def _hear(self, newcomer: socket.socket) -> None:
        try:
            set_timeout(newcomer, HEAR_S)
            hello = self._greet(newcomer)
            with self._lock:
                is_wanted = self._heard.pop(newcomer, None) is not None and not self._is_closed
            if hello is not None and is_wanted:
                set_timeout(newcomer, 0)
                self._admit(hello, Connection(newcomer.detach()))
        finally:
            with self._lock:
                self._heard.pop(newcomer, None)
            newcomer.close()

    def _greet(self, newcomer: socket.socket) -> dict[str, Any] | None:
        """Do the handshake and take one message; None if that goes wrong."""
        try:
            with Connection(os.dup(newcomer.fileno())) as pipe:
                admit(pipe, self._key)
                return receive(pipe)
        except (OSError, EOFError, MembershipError) as error:
            self._warn(error)
            return None

    def _warn(self, error: Exception) -> None:
        """Log it, but let nobody fill a disk."""
        self._warned += 1
        if not self._is_closed and self._warned & (self._warned - 1) == 0:
            logger.warning(
                "somebody at a socket of this job was turned away (%d so far): %s",
                self._warned,
                str(error) or "it hung up",
            )

    def close(self) -> None:
        """Let nobody in any more."""
        self._is_closed = True
        with self._lock:
            heard = list(self._heard)
        for each in (self._socket, *heard):
            _hang_up(each)
        self._thread.join()
        self._socket.close()


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # wakes its thread, which a close would not


def listen_at(address: str | tuple[str, int]) -> socket.socket:
    """Listen at a path, or at a port of all interfaces (of one, if the host is named).

    Raises:
        OSError: It is taken.
    """
    if isinstance(address, str):
        listener = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(address)
    elif address[0]:
        listener = socket.socket(socket.AF_INET)
    else:
        listener = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
        if listener.family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    end_if_silent(listener)  # what it accepts has the same options
    try:
        listener.bind(address)
    except BaseException:
        listener.close()
        raise
    listener.listen(1024)
    return listener
