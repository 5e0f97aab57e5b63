"""Ranks of a host give each other descriptors, over an abstract Unix socket.

Called by :mod:`paceline.shm.attach.handshake`. An abstract socket has no file: nothing is left when
a process dies half-way. The kernel says who is at the other end; another user is turned away, and
so is a process without the group's token. All waits have a deadline.

A client sends its descriptors without waiting for anybody: the kernel keeps them until the exchange
takes them. So when all ranks have said that they have sent, the exchange waits for nobody either,
and a side that goes away is seen at once by the other.
"""

from __future__ import annotations

import errno
import hmac
import socket
import struct
import time
from collections.abc import Sequence

from paceline.memory.descriptors import close_all, is_same_user, receive

_HELLO = struct.Struct("!I")
_FDS_PER_MESSAGE = 200  # the kernel takes 253
_TOKEN_BYTES = 32


class ExchangeClosedError(ConnectionError):
    """Something has gone wrong at the other end, which knows more about it."""


class Deadline:
    """A moment; every wait takes what is left until then."""

    def __init__(self, timeout_s: float) -> None:
        self._until_s = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Seconds left, never zero: a socket would take that for 'do not wait'."""
        return max(self._until_s - time.monotonic(), 0.001)

    def is_over(self) -> bool:
        """Say whether the moment has passed."""
        return time.monotonic() >= self._until_s


class FdExchange:
    """One rank's socket: takes descriptors from all its peers, and gives all of them to each."""

    def __init__(self, address: str, token: str) -> None:
        self._token = token
        self._peers: dict[int, socket.socket] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind("\0" + address)
        self._socket.listen(socket.SOMAXCONN)

    def collect(self, ranks: Sequence[int], each: int, deadline: Deadline) -> dict[int, list[int]]:
        """Take ``each`` descriptors from every rank.

        Raises:
            OSError: If somebody does not come in time.
        """
        found: dict[int, list[int]] = {}
        try:
            while len(found) < len(ranks):
                self._socket.settimeout(deadline.left_s())
                connection, _ = self._socket.accept()
                connection.settimeout(min(deadline.left_s(), 5.0))
                answer = self._hello(connection, each)
                if answer is None or answer[0] not in ranks or answer[0] in found:
                    connection.close()
                    close_all(answer[1] if answer else [])
                    continue
                self._peers[answer[0]] = connection
                found[answer[0]] = answer[1]
        except BaseException:
            for descriptors in found.values():
                close_all(descriptors)
            raise
        return found

    def send_all(self, descriptors: Sequence[int], deadline: Deadline) -> None:
        """Give all descriptors to every peer."""
        for connection in self._peers.values():
            connection.settimeout(deadline.left_s())
            for start in range(0, len(descriptors), _FDS_PER_MESSAGE):
                part = list(descriptors[start : start + _FDS_PER_MESSAGE])
                try:
                    socket.send_fds(connection, [b"."], part)
                except BrokenPipeError as error:
                    raise ExchangeClosedError(
                        "a peer that was to take descriptors is gone"
                    ) from error

    def fileno(self) -> int:
        """The descriptor of the socket."""
        return self._socket.fileno()

    def close(self) -> None:
        """Turn everybody away: who waits here is told at once."""
        for connection in self._peers.values():
            connection.close()
        self._socket.close()

    def __enter__(self) -> FdExchange:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hello(self, connection: socket.socket, each: int) -> tuple[int, list[int]] | None:
        """Let a peer in: the same user, the right token, the right number of descriptors."""
        if not is_same_user(connection):
            return None
        try:
            size = _HELLO.size + _TOKEN_BYTES
            data, descriptors = receive(connection, size, each)
        except OSError as error:
            if error.errno == errno.EMFILE:
                raise
            return None
        token = data[_HELLO.size :].decode("ascii", "replace")
        is_right = len(data) == size and hmac.compare_digest(token.encode(), self._token.encode())
        if not is_right or len(descriptors) != each:
            close_all(descriptors)
            return None
        return _HELLO.unpack(data[: _HELLO.size])[0], descriptors


class FdExchangeClient:
    """A peer's end: send descriptors, then take what all have sent."""

    def __init__(
        self, address: str, token: str, rank: int, mine: Sequence[int], deadline: Deadline
    ) -> None:
        """Send descriptors. Does not wait for the exchange.

        Raises:
            OSError: If nobody listens, or no descriptor for a socket.
        """
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _connect(self._connection, "\0" + address, deadline)
            if not is_same_user(self._connection):
                raise PermissionError("another user listens at the socket of a peer")
            hello = _HELLO.pack(rank) + token.encode()
            socket.send_fds(self._connection, [hello], list(mine))
        except BaseException:
            self.close()
            raise

    def take(self, expected: int, deadline: Deadline) -> list[int]:
        """Take everybody's descriptors.

        Raises:
            OSError: If they do not come in time, the exchange goes away, or there is no room.
        """
        received: list[int] = []
        try:
            while len(received) < expected:
                self._connection.settimeout(deadline.left_s())
                data, descriptors = receive(self._connection, 1, _FDS_PER_MESSAGE)
                received.extend(descriptors)
                if not data:
                    raise ExchangeClosedError("the peer that hands out descriptors has gone away")
        except BaseException:
            close_all(received)
            raise
        return received

    def close(self) -> None:
        """Leave."""
        self._connection.close()


def _connect(connection: socket.socket, address: str, deadline: Deadline) -> None:
    """Connect; if too many others are in the queue, try again."""
    while True:
        connection.settimeout(deadline.left_s())
        try:
            connection.connect(address)
            return
        except BlockingIOError:
            if deadline.is_over():
                raise
            time.sleep(0.005)
