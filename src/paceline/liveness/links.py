"""A connection to every rank on another host on which nothing is ever said: its end is the message.

Called by :mod:`paceline.liveness.roster` once the ranks of a group know each other.

[Note: cut links]
gloo learns that a peer is gone when the peer's kernel says so. A cable, a switch or a host without
power says nothing: a side that waits to receive waits until the group's time-out, 30 minutes by
default; one that has sent waits until TCP gives up, some 15 minutes. A limit on gloo's own
connections (TCP_USER_TIMEOUT) would be no help: it also ends those to a rank that lives and does
not read for a while. On a connection without data the kernel asks the other kernel now and then
(keep-alive), and ends the connection after :data:`SILENCE_S` without an answer, whatever the
processes are doing. A process that dies closes it at once.

A forked child would hold the connections open after its parent's death; it closes them.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import secrets
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.liveness.sockets import own_address

_IDLE_S, _INTERVAL_S, _PROBES = 2, 2, 3
SILENCE_S = _IDLE_S + _PROBES * _INTERVAL_S
"""How long another host may be silent, in seconds."""

CONNECT_S = 5.0
_TOKEN_BYTES = 16
_HELLO = struct.Struct(f"!I{_TOKEN_BYTES}s")


@dataclass(frozen=True)
class LinkAddress:
    """Where a rank takes links; no address: nowhere."""

    address: str
    port: int
    token: str

    def to_json(self) -> list[Any]:
        """Return what :meth:`from_json` takes."""
        return [self.address, self.port, self.token]

    @classmethod
    def from_json(cls, value: Any) -> LinkAddress:
        """Check what a peer sent."""
        address, port, token = value
        return cls(str(address), int(port), str(token))


class LinkListener:
    """Takes links from ranks that know the token, while the group is being made."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self.where = LinkAddress("", 0, secrets.token_hex(_TOKEN_BYTES))
        address = own_address()
        if not address:
            return
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError):
            self._socket = socket.create_server((address, 0), family=family, backlog=1024)
            self.where = LinkAddress(address, self._socket.getsockname()[1], self.where.token)

    def take(self, ranks: set[int], until_s: float) -> dict[int, socket.socket]:
        """Wait for links from these ranks; return those that came in time."""
        found: dict[int, socket.socket] = {}
        while self._socket is not None and ranks - found.keys():
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not select.select([self._socket], [], [], left_s)[0]:
                break
            link, _ = self._socket.accept()
            rank = self._read_hello(link)
            if rank in ranks and rank not in found:
                found[rank] = link
            else:
                link.close()
        return found

    def _read_hello(self, link: socket.socket) -> int:
        """Return the rank at the other end, or -1 if it does not know the token."""
        link.settimeout(1.0)
        try:
            data = link.recv(_HELLO.size, socket.MSG_WAITALL)
        except OSError:
            return -1
        if len(data) != _HELLO.size:
            return -1
        rank, token = _HELLO.unpack(data)
        is_right = hmac.compare_digest(token, bytes.fromhex(self.where.token))
        return int(rank) if is_right else -1

    def close(self) -> None:
        """Take no more."""
        if self._socket is not None:
            self._socket.close()


def make_links(
    rank: int, addresses: Sequence[LinkAddress], remote: Sequence[int], listener: LinkListener
) -> dict[int, socket.socket]:
    """Link this rank with those on other hosts; without an answer there is no link.

    The higher rank calls on the lower one. A call is taken by the kernel, so nobody waits for
    anybody who waits.
    """
    until_s = time.monotonic() + CONNECT_S
    links: dict[int, socket.socket] = {}
    for peer in remote:
        if peer < rank and addresses[peer].port:
            with contextlib.suppress(OSError, ValueError):
                links[peer] = _call(rank, addresses[peer])
    links |= listener.take(
        {peer for peer in remote if peer > rank and addresses[peer].port}, until_s
    )
    for link in links.values():
        _keep_alive(link)
    return links


def _call(rank: int, to: LinkAddress) -> socket.socket:
    link = socket.create_connection((to.address, to.port), timeout=CONNECT_S)
    link.sendall(_HELLO.pack(rank, bytes.fromhex(to.token)))
    return link


def _keep_alive(link: socket.socket) -> None:
    link.setblocking(False)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _INTERVAL_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)


def is_unreachable(link: socket.socket) -> bool:
    """Whether a link that has ended did so by silence, not because the process at its end is gone.

    Once: the kernel tells it to the first who asks.
    """
    error = link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    return error not in (0, _RESET)


_RESET = errno.ECONNRESET
