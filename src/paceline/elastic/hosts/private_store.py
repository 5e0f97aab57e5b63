"""A rank's end of a :mod:`~paceline.elastic.hosts.key_store`: a ``dist.Store`` over a Unix socket.

Opened by :mod:`paceline.elastic.epoch_store` on several hosts. torch's TCPStore knows no key, so
whoever reaches its port can change what ranks agree on; this one is behind a listener that asks
for the key.

[Note: who keeps a store]
torch keeps the C++ half of a store that is written in Python, and not the Python half. Without that
the group's next access fails. So those of the last epochs are kept here.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import os
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from paceline.elastic.epoch_watch import check_epoch
from paceline.elastic.handshake import connect, read_key
from paceline.elastic.hosts.key_store import MAX_BYTES, MAX_WAIT_S, pack, unpack
from paceline.elastic.protocol import key_path, send, stores_path
from paceline.errors import MembershipError

_CONNECT_S = 20.0  # whoever serves it may have to be started again
_KEPT = 4


class PrivateStore(dist.Store):  # type: ignore[name-defined,misc]
    """See the module. For any number of threads of one process."""

    def __init__(self, directory: Path, name: str) -> None:
        super().__init__()
        self.name = name
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._pipe = _connect(directory, name)

    def set(self, key: str, value: str | bytes) -> None:
        """As ``dist.Store`` has it, like all below."""
        self._ask("set", [key], value)

    def get(self, key: str) -> bytes:
        """Waits for the key."""
        while True:
            words, value = self._ask("get", [key])
            if words["is"]:
                return value
            self.wait([key])

    def add(self, key: str, amount: int) -> int:
        """Add to a number; return what it is then."""
        return int(self._ask("add", [key], by=amount)[0]["number"])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set it if it is what is expected; return what it is then."""
        first, second = _bytes(expected), _bytes(desired)
        return self._ask("compare_set", [key], first + second, split=len(first))[1]

    def check(self, keys: list[str]) -> bool:
        """Say whether all are there. Also who only looks, again and again, is woken."""
        is_there = bool(self._ask("check", keys)[0]["is"])
        if not is_there:
            check_epoch()
        return is_there

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait for all."""
        limit_s = (timeout or self.timeout).total_seconds()
        until_s = time.monotonic() + limit_s
        while not self._ask("wait", keys, limit_s=min(limit_s, MAX_WAIT_S))[0]["is"]:
            check_epoch()
            if time.monotonic() >= until_s:
                raise dist.DistStoreError(f"{keys} did not come for {limit_s:g} s")

    def delete_key(self, key: str) -> bool:
        """Remove it; say whether it was there."""
        return bool(self._ask("delete", [key])[0]["is"])

    def num_keys(self) -> int:
        """How many there are."""
        return int(self._ask("count", [])[0]["number"])

    def _ask(
        self, op: str, keys: list[str], value: str | bytes = b"", **facts: Any
    ) -> tuple[dict[str, Any], bytes]:
        if os.getpid() != self._pid:
            raise dist.DistStoreError("a forked process has no part in the store of its parent")
        try:
            with self._lock:
                self._pipe.send_bytes(pack({"op": op, "keys": keys, **facts}, _bytes(value)))
                return unpack(self._pipe.recv_bytes(MAX_BYTES))
        except (OSError, EOFError) as error:
            raise dist.DistNetworkError(f"the store {self.name} of the job is gone") from error

    def close(self) -> None:
        """Hang up."""
        if os.getpid() == self._pid:
            self._pipe.close()


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _connect(directory: Path, name: str) -> Connection:
    until_s = time.monotonic() + _CONNECT_S
    while True:
        with contextlib.suppress(OSError, EOFError, MembershipError):
            pipe = connect(stores_path(directory), read_key(key_path(directory)), _CONNECT_S)
            send(pipe, "keys", name=name)
            return pipe
        if time.monotonic() >= until_s:
            raise dist.DistNetworkError(f"the store {name} of the job cannot be reached")
        time.sleep(0.05)


_kept: collections.deque[PrivateStore] = collections.deque()
"""[Note: who keeps a store]"""


def private_store(directory: Path, name: str) -> PrivateStore:
    """Open a store, or find it if it is open."""
    for store in _kept:
        if store.name == name and store._pid == os.getpid():
            return store
    while len(_kept) >= _KEPT:
        _kept.popleft().close()
    _kept.append(PrivateStore(directory, name))
    return _kept[-1]
