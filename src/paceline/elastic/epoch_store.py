"""Where the ranks of an epoch meet: with the launcher, never in a rank, and out of others' reach.

On one host a file in the launcher's private directory; on several a store of the first host's
launcher, behind listeners that ask for the job's key (:mod:`paceline.elastic.hosts.tunnel`).

``init_process_group()`` of a script takes its store from here, too (:func:`replace_store`), so
that the first epoch is no exception. ``MASTER_ADDR`` and ``MASTER_PORT`` are as under torchrun, for
scripts that use them by themselves: nothing else does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from paceline.elastic.hosts.private_store import private_store
from paceline.elastic.member_process import is_member
from paceline.elastic.protocol import ATTEMPT, DIRECTORY, HOSTS, store_path
from paceline.torch_private.rendezvous import Handler, Meeting, query_of, replace_env_handler


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
    return dist.FileStore(str(store_path(directory, name)), world)  # type: ignore[attr-defined]


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
