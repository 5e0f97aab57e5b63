"""Another user of the host at every port of an elastic job on one host."""

from __future__ import annotations

import contextlib
import datetime
import encodings.idna
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from paceline.elastic.hosts.listening import sockets_of, tcp_table
from tests.attack.second_user import as_other_user
from tests.elastic.jobs import JobOnSharedServer, check, run_job

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
]

assert encodings.idna  # found when somebody connects: another user may not be able to
_LISTENS = "0A"
_NOISE = (b"\xff" * 64, b"GET / HTTP/1.1\r\n\r\n", b"")


def ports_of(pids: list[int]) -> set[int]:
    """Where processes listen, at any address."""
    found = set()
    for pid in pids:
        own = {inode for _, inode in sockets_of(f"/proc/{pid}/fd")}
        for inode, (local, _, state) in tcp_table().items():
            if state == _LISTENS and inode in own:
                found.add(int(local.rpartition(":")[2], 16))
    return found


def disturb(ports: list[int], store: int) -> dict[str, Any]:
    """Make noise at all ports; write to the store at one of them, and count what is in it."""
    reached = 0
    for port in ports:
        for data in _NOISE if port != store else ():
            with contextlib.suppress(OSError):
                with socket.create_connection(("127.0.0.1", port), 5) as loud:
                    loud.sendall(data)
                reached += 1
    limit = datetime.timedelta(seconds=20)
    theirs = dist.TCPStore("127.0.0.1", store, is_master=False, timeout=limit)  # type: ignore[attr-defined]
    keys = theirs.num_keys()
    for rank in range(3):
        for prefix in ("default_pg/0/", "default_pg/0//cpu//", ""):
            theirs.set(f"{prefix}{rank}", "x")
    return {"reached": reached, "keys": keys}


def test_strangers_find_nothing_and_change_nothing(tmp_path: Path) -> None:
    """Noise at every port while ranks train, one dies, and its replacement joins."""
    found: list[dict[str, Any]] = []
    threads: list[threading.Thread] = []

    def attack(job: JobOnSharedServer) -> None:
        if not job._folder.membership.exists() or any(each.is_alive() for each in threads):
            return
        stores = job._stores
        if stores is None or len(found) >= 3 or not job._members:
            return
        store = next(iter(stores._ports.values()))
        pids = [rank.child.pid for rank in job._members.values()]
        ports = sorted(ports_of([*pids, stores._child.pid]))
        assert store in ports
        threads.append(
            threading.Thread(target=lambda: found.append(as_other_user(disturb, ports, store)))
        )
        threads[-1].start()

    faults = [("kill", "forward", 20, 1)]
    ended = run_job(tmp_path, faults=faults, steps=40, pause_s=0.1, hold_s=60.0, on_wait=attack)
    for each in threads:
        each.join()
    check(ended, faults=1, world=3, steps=40)
    assert found
    assert found[0]["reached"] > 0, found
    assert found[0]["keys"] == 0, found
