"""Where the ranks of an epoch meet: with the launcher, never in a rank, and out of others' reach.

On one host a file in the launcher's private directory; on several a store of the first host's
launcher, behind listeners that ask for the job's key (:mod:`paceline.elastic.hosts.tunnel`).

Who waits in one is woken when the epoch is over (:mod:`paceline.elastic.epoch_watch`).

``init_process_group()`` of a script takes its store from here, too (:func:`replace_store`), so
that the first epoch is no exception. ``MASTER_ADDR`` and ``MASTER_PORT`` are as under torchrun, for
scripts that use them by themselves: nothing else does.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from paceline.elastic.epoch_watch import check_epoch
from paceline.elastic.hosts.private_store import private_store
from paceline.elastic.member_process import is_member
from paceline.elastic.protocol import ATTEMPT, DIRECTORY, HOSTS, store_path
from paceline.torch_private.rendezvous import Handler, Meeting, query_of, replace_env_handler

_LOOK_EVERY_S = 0.001


def is_on_several_hosts() -> bool:
    """Whether the job may have ranks elsewhere."""
    return HOSTS in os.environ


def open_store(epoch: int, world: int) -> Any:
    """Open the store of an epoch; all its ranks find the same."""
    return _open(f"epoch-{epoch}", world)


def _open(name: str, world: int) -> Any:
    directory = Path(os.environ[DIRECTORY])
    if is_on_several_hosts():
        return private_store(directory, name)
    _kept[:] = [_WatchedFile(store_path(directory, name), world)]
    return _kept[0]


class _WatchedFile(dist.Store):  # type: ignore[name-defined,misc]
    """A ``FileStore`` that looks for the end of the epoch while it waits."""

    def __init__(self, path: Path, world: int) -> None:
        super().__init__()
        self._file = dist.FileStore(str(path), world)  # type: ignore[attr-defined]

    def set(self, key: str, value: str | bytes) -> None:
        """As ``dist.Store`` has it, like all below."""
        self._file.set(key, value)  # type: ignore[arg-type]  # bytes, too

    def get(self, key: str) -> bytes:
        """Waits for the key."""
        self.wait([key])
        value: bytes = self._file.get(key)
        return value

    def add(self, key: str, amount: int) -> int:
        """Add to a number; return what it is then."""
        return int(self._file.add(key, amount))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set it if it is what is expected; return what it is then."""
        value: bytes = self._file.compare_set(key, expected, desired)  # type: ignore[arg-type]
        return value

    def check(self, keys: list[str]) -> bool:
        """Say whether all are there. Also who only looks, again and again, is woken."""
        is_there = bool(self._file.check(keys))
        if not is_there:
            check_epoch()
        return is_there

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait for all."""
        limit_s = (self.timeout if timeout is None else timeout).total_seconds()
        until_s = time.monotonic() + limit_s
        while not self.check(keys):
            if time.monotonic() >= until_s:
                raise dist.DistStoreError(f"{keys} did not come for {limit_s:g} s")
            time.sleep(_LOOK_EVERY_S)

    def delete_key(self, key: str) -> bool:
        """Remove it; say whether it was there."""
        return bool(self._file.delete_key(key))

    def num_keys(self) -> int:
        """How many there are."""
        return int(self._file.num_keys())


_kept: list[_WatchedFile] = []
"""[Note: who keeps a store] in private_store.py. One only: the end of a FileStore makes its file
anew if that was removed, and agents remove those of old epochs."""


def replace_store() -> None:
    """Let ``init_process_group()`` of this process use a private store. Once in a process."""
    replace_env_handler(_private)


def _private(theirs: Handler) -> Handler:
    def meet(url: str, **options: Any) -> Iterator[Meeting]:
        if not is_member():  # forked from one
            yield from theirs(url, **options)
            return
        given = query_of(url)
        rank = int(given.get("rank", os.environ["RANK"]))
        world = int(given.get("world_size", os.environ["WORLD_SIZE"]))
        yield _first_store(world), rank, world

    return meet


def _first_store(world: int) -> Any:
    """For the members that begin together; who joins later is alone at first."""
    if ATTEMPT not in os.environ:
        return dist.HashStore()  # type: ignore[attr-defined]
    return _open(f"attempt-{os.environ[ATTEMPT]}", world)
