"""The groups under test: the same ranks as a gloo group, as a paceline group, and as two hosts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

SUBJECTS = ("gloo", "paceline", "two hosts")
TIMEOUT = timedelta(seconds=100)


@contextlib.contextmanager
def subject(name: str, rank: int, world: int) -> Iterator[str]:
    """Yield the name of the backend to make groups with.

    "two hosts" is paceline over two hosts: the first ranks on one, the others on the other, one
    more on the first if their number is odd. Sums go by leaders, and the rest is gloo's.
    """
    if name != "two hosts":
        yield name
        return
    os.environ["PACELINE_HOST_ID"] = f"host-{rank * 2 // world}"
    try:
        yield "paceline"
    finally:
        del os.environ["PACELINE_HOST_ID"]


def make_groups(name: str) -> dict[str, Any]:
    """Make overlapping groups of the ranks of the default group; None for those without this rank.

    Collective over all ranks.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    half = (world + 1) // 2
    members = {"world": range(world), "low": range(half), "high": range(half, world)}
    groups: dict[str, Any] = {}
    with subject(name, rank, world) as backend:
        for where, ranks in members.items():
            if ranks:
                group = dist.new_group(list(ranks), timeout=TIMEOUT, backend=backend)
                groups[where] = group if rank in ranks else None
    return groups
