"""The gloo group inside a Paceline group: for what shared memory does not do, and between hosts.

One of the few places that build a c10d group by hand: inside ``init_process_group`` there is no
default group yet, so that ``new_group`` cannot be called.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline.shm.connect import Gather
from paceline.torch_private import gloo_group

MAX_WORD_BYTES = 1 << 20


def make_gloo(
    store: Any, rank: int, world: int, timeout: timedelta, name: str
) -> dist.ProcessGroup:
    """Make a gloo group over ``store``; collective over its ranks."""
    return gloo_group(dist.PrefixStore(name, store), rank, world, timeout)  # type: ignore[attr-defined]


def gather_by_store(store: Any, rank: int, world: int) -> Gather:
    """Let ranks tell each other something (JSON) through a store."""
    calls = iter(range(1 << 30))

    def gather(value: Any) -> list[Any]:
        call = next(calls)
        store.set(f"paceline/{call}/{rank}", json.dumps(value))
        words: list[bytes] = [store.get(f"paceline/{call}/{peer}") for peer in range(world)]
        if max(map(len, words)) > MAX_WORD_BYTES:
            raise ValueError(f"a rank sent more than {MAX_WORD_BYTES} bytes")
        return [json.loads(word) for word in words]

    return gather


def lane_ranks(hosts: Sequence[Sequence[int]], lane: int) -> list[int]:
    """Return the ranks that exchange slice ``lane``: one of each host."""
    return [host[lane] for host in hosts]
