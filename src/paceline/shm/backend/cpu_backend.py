"""What ``group._get_backend(torch.device("cpu"))`` returns for a Paceline group.

c10d calls two things a group: the ``ProcessGroup`` that users hold, and inside of it a ``Backend``
for each device. Collectives are called on the first, which torch lets one write in
Python. The second must be a class of C++, and torch asks it what it can do, or which time-out it
has: ``checkpoint.async_save``, ``_set_pg_timeout``, device meshes, ``shrink_group``.

So the backend is gloo's, of the inner group: what torch sends through it directly arrives, over
gloo. What changes the group goes to the group.

[Note: shrinking]
``dist.shrink_group`` asks the backend for the backend of the ranks that are left, and makes the
group around it itself: a group of C++, whose collectives are the backend's, so gloo's. Wrappers on
it use shared memory all the same, and so does ``new_group`` afterwards. Torch keeps only the C++
part of what it is given: the object is held here until its group is destroyed, so that a group can
be shrunk again.
"""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline.liveness import Watch
from paceline.liveness.store import gather_by_store
from paceline.shm.backend.gloo import MAKING
from paceline.torch_private.groups import SHRINK_ABORT, gloo_options, is_backend_in_use


class CpuBackend(dist.ProcessGroupGloo):
    """gloo, as the inner group of a Paceline group."""

    def __init__(
        self, store: Any, rank: int, world: int, timeout: timedelta, owner: dist.ProcessGroup | None
    ) -> None:
        # With two threads, collectives with long names may break the heap: [Note: sparse
        # all-reduce on gloo] in transport/sparse.py.
        super().__init__(store, rank, world, gloo_options(timeout, threads=1))
        # Weak: the group holds its backend.
        self._owner = weakref.ref(owner) if owner is not None else lambda: None
        self._base = store
        self._timeout = timeout
        self._shrinks = 0

    def _set_default_timeout(self, timeout: timedelta) -> None:
        """Change the deadline of the whole group: ``_set_pg_timeout`` asks the backend for it."""
        self._timeout = timeout
        owner = self._owner()
        if owner is not None:
            owner.set_timeout(timeout)
        else:
            super()._set_default_timeout(timeout)

    @property
    def supports_shrinking(self) -> bool:
        """``dist.shrink_group`` works: [Note: shrinking]."""
        return True

    def shrink(
        self, ranks_to_exclude: list[int], shrink_flags: int = 0, opts_override: Any = None
    ) -> CpuBackend:
        """The backend of the ranks that are left. Collective over those.

        Args:
            ranks_to_exclude: Ranks of this group, dead or alive.
            shrink_flags: ``SHRINK_ABORT``: release who waits in a collective of this group first.
            opts_override: Options of gloo; their time-out is taken.

        Raises:
            PeerLostError: A rank that is to stay has died.
        """
        owner = self._owner()
        if shrink_flags & SHRINK_ABORT and owner is not None:
            owner.abort()
        stay = [rank for rank in range(self.size()) if rank not in set(ranks_to_exclude)]
        rank, world = stay.index(self.rank()), len(stay)
        timeout = getattr(opts_override, "_timeout", None) or self._timeout
        name = f"paceline/shrink/{self._shrinks}/{'-'.join(map(str, stay))}"
        self._shrinks += 1
        store = dist.PrefixStore(name, self._base)  # type: ignore[attr-defined]
        watch = Watch(store, rank, world)
        watch.meet(gather_by_store(store, rank, world, watch, timeout, MAKING))
        made: CpuBackend = watch.call(MAKING, lambda: CpuBackend(store, rank, world, timeout, None))
        release_destroyed()
        _shrunk.append(made)
        return made


_shrunk: list[CpuBackend] = []
"""Backends of groups that were shrunk."""


def release_destroyed() -> None:
    """Let go of backends whose groups are destroyed; the latest may have no group yet."""
    _shrunk[:] = [each for each in _shrunk if is_backend_in_use(each)]
