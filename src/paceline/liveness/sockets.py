"""The network address under which this process's peers reach it.

gloo chooses one when a group is made and does not tell; it is found at the ends of the connections
that this process has.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections import Counter
from collections.abc import Iterator

_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def own_address() -> str:
    """The address that most of this process's TCP connections to other hosts have here, or ''."""
    found: Counter[str] = Counter()
    for connection in _tcp_connections():
        with contextlib.suppress(OSError, ValueError):
            connection.getpeername()  # raises for one that only listens
            address = ipaddress.ip_address(connection.getsockname()[0].partition("%")[0])
            address = getattr(address, "ipv4_mapped", None) or address
            if not address.is_loopback and not address.is_link_local:
                found[str(address)] += 1
    return found.most_common(1)[0][0] if found else ""


def _tcp_connections() -> Iterator[socket.socket]:
    """Copies of the descriptors that are TCP sockets; each is closed after its turn."""
    for number in _socket_descriptors():
        try:
            connection = socket.socket(fileno=os.dup(number))
        except OSError:  # closed meanwhile
            continue
        with connection:
            if connection.family in _FAMILIES and connection.type == socket.SOCK_STREAM:
                yield connection


def _socket_descriptors() -> list[int]:
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return []
    found = []
    for name in names:
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.append(int(name))
    return found
