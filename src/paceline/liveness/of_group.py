"""The watch of each process group of this process.

Called by whatever waits for a group: ``watch_of(group).run(...)``.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist

from paceline.config import BACKEND_NAME
from paceline.forks import finalize_here
from paceline.liveness.watch import Watch
from paceline.torch_private.groups import group_store

KEEP_LOOK_S = 1.0
_WAITS_IN_SLICES = ("gloo", BACKEND_NAME)
_watches: weakref.WeakKeyDictionary[Any, Watch] = weakref.WeakKeyDictionary()


def watch_of(group: dist.ProcessGroup) -> Watch:
    """Return the watch of a group; it lasts as long as the group."""
    watch = _watches.get(group)
    if watch is None:
        ranks = dist.get_process_group_ranks(group)
        # torchrun's agent keeps the store for its workers; without it, rank 0 of all does.
        by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        watch = Watch(
            group_store(group),
            group.rank(),
            group.size(),
            has_slices=dist.get_backend(group) in _WAITS_IN_SLICES,
            store_rank=ranks.index(0) if 0 in ranks and not by_agent else None,
        )
        adopt(group, watch)
    return watch


def adopt(group: dist.ProcessGroup, watch: Watch) -> None:
    """Give a group a watch that was made for it; it is closed when the group goes."""
    _watches[group] = watch
    to_keep = weakref.ref(group)
    watch.keeps = lambda work: _keep(to_keep(), work)
    finalize_here(group, watch.roster.close)


def give_up_waits() -> None:
    """End all waits for the groups of this process soon: their connections have been cut."""
    for watch in list(_watches.values()):
        watch.is_given_up = True


def _keep(group: dist.ProcessGroup | None, work: Any) -> None:
    """Keep a group until a collective of it has ended: [Note: what gloo forgets]."""

    def wait(_group: dist.ProcessGroup | None) -> None:
        while not work.is_completed():
            time.sleep(KEEP_LOOK_S)

    threading.Thread(target=wait, args=(group,), name="paceline-keep", daemon=True).start()


def gather_all(group: dist.ProcessGroup, mine: torch.Tensor, what: str) -> list[torch.Tensor]:
    """Give every rank the tensors of all ranks, in rank order. All have one size and dtype."""
    out = [torch.empty_like(mine) for _ in range(group.size())]
    watch_of(group).run(what, lambda: group.allgather([out], [mine]))
    return out
