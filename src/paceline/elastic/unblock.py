"""Frees a thread that waits in a collective, whatever it runs on.

Called by the listening thread of :mod:`paceline.elastic.client`, again and again, until the
training thread has left. Paceline's own groups have ``abort``. gloo has none: a thread in it is
freed by ending the connections to the other ranks, which gloo reports as an error; not always, so
waits of Paceline's end by themselves then ([Note: what gloo forgets] in
:mod:`paceline.liveness.wait_guard`).

[Note: which connections are gloo's]
gloo does not tell. A connection is one between ranks
- on one host: if its other end belongs to a process of another rank;
- between hosts: if its other end is where a rank of another host listens, or if it was accepted
  where this rank listens and comes from an address at which such a rank listens. Ranks tell each
  other where they listen when an epoch begins, launchers again and again, for groups that are
  made later; sockets that listen at the loopback address
  or at all addresses are not gloo's, and do not count.
Everything else (databases, loggers, parameter servers, the store) is left alone. The other end may
be gone, with its host: the connection is cut all the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from paceline.ddp import DistributedDataParallel
from paceline.elastic.hosts.listening import address_of, listening_at, sockets_of, tcp_table
from paceline.elastic.protocol import DIRECTORY, peers_path
from paceline.liveness import give_up_waits
from paceline.torch_private.groups import registered_groups


def free_collectives(
    wrappers: Iterable[DistributedDataParallel],
    peers: Iterable[int],
    listens: Collection[str],
) -> None:
    """Make every collective of this process end with an error.

    Args:
        wrappers: Whose transports are aborted.
        peers: Processes of the other ranks on this host.
        listens: Where the other ranks listened when the epoch began.
    """
    for wrapper in wrappers:
        wrapper._transport.abort()
    for group in _groups():
        with contextlib.suppress(RuntimeError):
            group.abort()
    cut_connections(set(peers), read_listens() | set(listens))
    give_up_waits()


def _groups() -> list[Any]:
    from paceline.shm.backend.process_group import PacelineGroup

    return [group for group in registered_groups() if isinstance(group, PacelineGroup)]


def cut_connections(peers: set[int], listens: Collection[str] = ()) -> int:
    """End all TCP connections of this process to other ranks.

    Args:
        peers: Processes of this host.
        listens: Where ranks of other hosts listen, as the kernel's tables have it.
    """
    theirs = {inode for pid in peers for _, inode in sockets_of(f"/proc/{pid}/fd")}
    mine = {inode: int(number) for number, inode in sockets_of("/proc/self/fd")}
    table = tcp_table()
    by_ends = {(local, remote): inode for inode, (local, remote, _) in table.items()}
    listening = set(listening_at([os.getpid()]))
    addresses = {address_of(end) for end in listens}
    cut = 0
    for inode, number in mine.items():
        if inode not in table:
            continue
        local, remote, _ = table[inode]
        is_near = by_ends.get((remote, local)) in theirs
        is_far = remote in listens or (local in listening and address_of(remote) in addresses)
        if is_near or is_far:
            cut += _shut(number, inode)
    return cut


def read_listens() -> set[str]:
    """Where ranks of other hosts listen, as the launcher has heard last."""
    try:
        found = json.loads(peers_path(Path(os.environ[DIRECTORY])).read_text())
    except (OSError, ValueError, KeyError):
        return set()
    return {str(end) for end in found}


def _shut(number: int, inode: str) -> int:
    try:
        with socket.socket(fileno=os.dup(number)) as connection:
            # Its number may be that of another socket by now, of a new group's listener even.
            if os.fstat(connection.fileno()).st_ino != int(inode):
                return 0
            connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # closed meanwhile
        return 0
    return 1
