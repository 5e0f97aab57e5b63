"""Where processes listen for others, and which connections they have: the kernel's tables.

Ends of connections are kept as the tables have them (address and port in hexadecimal digits): they
are compared, never read.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

_TABLES = ("net/tcp", "net/tcp6")
_LISTENS = "0A"  # <net/tcp_states.h>
_LOOPBACK = ("0100007F", "00000000000000000000000001000000")


def listening_at(pids: Iterable[int]) -> list[str]:
    """Ends at which processes of this host listen for other hosts.

    Sockets that listen at the loopback address, or at all addresses, are not among them: gloo
    listens at the address that it tells the others.
    """
    found: set[str] = set()
    for pid in pids:
        own = {inode for _, inode in sockets_of(f"/proc/{pid}/fd")}
        table = tcp_table(f"/proc/{pid}")
        found |= {local for inode, (local, _, state) in table.items()
                  if inode in own and state == _LISTENS}  # fmt: skip
    return sorted(end for end in found if _is_for_others(end))


def _is_for_others(end: str) -> bool:
    address = end.partition(":")[0]
    return address not in _LOOPBACK and address.strip("0") != ""


def address_of(end: str) -> str:
    """The address without the port."""
    return end.partition(":")[0]


def tcp_table(process: str = "/proc/self") -> dict[str, tuple[str, str, str]]:
    """Both ends and the state of every TCP socket of a process's host, by inode."""
    found: dict[str, tuple[str, str, str]] = {}
    for table in _TABLES:
        with contextlib.suppress(OSError):
            for line in Path(process, table).read_text().splitlines()[1:]:
                words = line.split()
                found[words[9]] = (words[1], words[2], words[3])
    return found


def sockets_of(directory: str) -> list[tuple[str, str]]:
    """Descriptors and inodes of all sockets that are open in a process."""
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            with contextlib.suppress(OSError):
                target = os.readlink(f"{directory}/{name}")
                if target.startswith("socket:["):
                    found.append((name, target[8:-1]))
    return found
