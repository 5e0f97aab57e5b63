"""``dist.monitored_barrier`` for Paceline groups.

torch's function refuses, by its name, every backend but gloo, before it asks the group. When the
first Paceline group is made, the function is replaced by one that asks a Paceline group, and
leaves all other groups to torch's.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

MARK = "_takes_paceline_groups"


def accept_groups(kind: type[dist.ProcessGroup]) -> None:
    """Let ``dist.monitored_barrier`` take groups of this class too. Does nothing a second time."""
    of_torch = dist.monitored_barrier
    if hasattr(of_torch, MARK):
        return

    @functools.wraps(of_torch)
    def monitored_barrier(
        group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
        wait_all_ranks: bool = False,
    ) -> Any:
        target = dist.group.WORLD if group is None else group
        if not isinstance(target, kind):
            return of_torch(group, timeout, wait_all_ranks)
        target.monitored_barrier(timeout, wait_all_ranks)  # type: ignore[attr-defined]
        return None

    setattr(monitored_barrier, MARK, True)
    dist.monitored_barrier = distributed_c10d.monitored_barrier = monitored_barrier
