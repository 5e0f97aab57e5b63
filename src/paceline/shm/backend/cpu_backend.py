"""What ``group._get_backend(torch.device("cpu"))`` returns for a Paceline group.

c10d calls two things a group: the ``ProcessGroup`` that users hold, and inside of it a ``Backend``
for each device. Collectives are called on the first, which torch lets one write in
Python. The second must be a class of C++, and torch asks it what it can do, or which time-out it
has: ``checkpoint.async_save``, ``_set_pg_timeout``, device meshes, ``shrink_group``.

So the backend is gloo's, of the inner group: what torch sends through it directly arrives, over
gloo. What changes the group goes to the group.
"""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline.torch_private import gloo_options


class CpuBackend(dist.ProcessGroupGloo):
    """gloo, as the inner group of a Paceline group."""

    def __init__(
        self, store: Any, rank: int, world: int, timeout: timedelta, owner: dist.ProcessGroup
    ) -> None:
        # With two threads, collectives with long names may break the heap: [Note: sparse
        # all-reduce on gloo] in paceline/transport/sparse.py.
        super().__init__(store, rank, world, gloo_options(timeout, threads=1))
        # Weak: the group holds its backend.
        self._owner = weakref.ref(owner)

    def _set_default_timeout(self, timeout: timedelta) -> None:
        """Change the deadline of the whole group: ``_set_pg_timeout`` asks the backend for it."""
        owner = self._owner()
        if owner is not None:
            owner.set_timeout(timeout)
