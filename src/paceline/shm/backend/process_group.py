"""The c10d backend ``"paceline"``: ``dist.init_process_group("paceline")``.

Collectives on CPU tensors go through shared memory as far as
:mod:`paceline.shm.backend.operations` can do them; everything else is the inner gloo group's:
sparse tensors, point to point, dtypes that cannot be reduced, and between hosts all but sums.
Called by ``torch.distributed`` only.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from paceline.config import BACKEND_NAME
from paceline.forks import Owner, finalize_here, keep_for_ever, tell_children
from paceline.gloo_threads import wait_for_gloo_at_exit
from paceline.liveness import Watch, adopt, watch_of
from paceline.liveness.store import gather_by_store
from paceline.shm.attach.connect import SharingRefusal, connect
from paceline.shm.attach.connection import Connection
from paceline.shm.backend.cpu_backend import CpuBackend, release_destroyed
from paceline.shm.backend.flight_recorder import UNRECORDED, flight_recorder
from paceline.shm.backend.gloo import MAKING, make_gloo
from paceline.shm.backend.monitored_barrier import accept_groups
from paceline.shm.backend.operations import CrossHostOperations, HostOperations
from paceline.shm.backend.profiling import ProfiledCall
from paceline.shm.backend.work import FutureThread
from paceline.shm.collectives.chunked import HEAP_BYTES
from paceline.shm.collectives.cross_host import (
    CHANNELS,
    CrossHostGroup,
    count_leaders,
    leader_ranks,
)
from paceline.shm.diagnose.errors import forked_error
from paceline.torch_private.compile import never_compiled
from paceline.torch_private.groups import attach_cpu_backend, gloo_group
from paceline.torch_private.profiler import is_profiled


@never_compiled  # torch's own DDP calls these methods in a backward that may be compiled
def _forward(name: str) -> Callable[..., Any]:
    """Make a method that asks shared memory first, then the inner group."""

    def method(self: PacelineGroup, *args: Any, **kwargs: Any) -> Any:
        if not self._owner.is_here():
            raise forked_error(self.rank(), self._owner.pid)
        self._started += 1
        if self._recorder is not None or is_profiled():
            return self._run_watched(name, args, kwargs)
        if self._operations is not None:
            work = getattr(self._operations, name)(*args, **kwargs)
            if work is not None:
                return work
        return getattr(self._inner, name)(*args, **kwargs)

    method.__name__ = name
    method.__doc__ = (
        f"c10d's ``{name}``; see :class:`paceline.shm.backend.operations.HostOperations`."
    )
    return method


class PacelineGroup(dist.ProcessGroup):
    """A c10d group whose ranks share memory as far as they can.

    Attributes:
        refusal: Why they do not; empty if they do.
    """

    def __init__(self, store: Any, rank: int, world: int, timeout: timedelta) -> None:
        super().__init__(rank, world)  # type: ignore[call-arg]
        self._owner = Owner()
        self._store = store
        self._timeout = timeout
        self._started = self._splits = 0
        self._name = self._text = ""
        self._recorder = flight_recorder()
        self._futures = FutureThread()
        self._operations: HostOperations | CrossHostOperations | None = None
        wait_for_gloo_at_exit()
        release_destroyed()
        accept_groups(PacelineGroup)
        watch = Watch(store, rank, world)
        adopt(self, watch)
        gather = gather_by_store(store, rank, world, watch, timeout, MAKING)
        watch.meet(gather)
        own_store = dist.PrefixStore("paceline/inner", store)  # type: ignore[attr-defined]
        # Kept here too: C++ holds it, but would forget that its class is one of Python.
        self._cpu_backend = watch.call(
            MAKING, lambda: CpuBackend(own_store, rank, world, timeout, self)
        )
        self._inner: Any = gloo_group(own_store, self._cpu_backend)
        attach_cpu_backend(self, self._cpu_backend)
        tell_children(self)
        found = connect(rank, gather, heap_bytes=HEAP_BYTES, channels=CHANNELS)
        self.refusal = found.reason if isinstance(found, SharingRefusal) else ""
        if isinstance(found, Connection):
            try:
                self._operations = self._make_operations(found)
            except BaseException:  # a rank is lost while leaders connect
                found.close()
                raise
            self._status = found.status
            self._finalizer = finalize_here(self, _leave, self._operations, found, self._futures)
        elif found.is_fault and rank == 0:
            text = f"The paceline group works over gloo, not over shared memory: {found.reason}."
            warnings.warn(text, stacklevel=2)

    def _make_operations(self, connection: Connection) -> HostOperations | CrossHostOperations:
        timeout_s = self._timeout.total_seconds()
        if len(connection.hosts) == 1:
            return HostOperations(connection, self._futures, timeout_s)
        leader_group = None
        if connection.index < count_leaders(connection):
            ranks = leader_ranks(connection.hosts, connection.index)
            index, name = ranks.index(self.rank()), f"paceline/leaders{connection.index}"
            make = partial(make_gloo, self._store, index, len(ranks), self._timeout, name)
            leader_group = watch_of(self).call(MAKING, make)
        group = CrossHostGroup(connection, leader_group, timeout_s, watch_of(self))
        return CrossHostOperations(group, self._futures)

    # --- what c10d asks about a group ------------------------------------------------------------

    def getBackendName(self) -> str:
        """The name under which it was registered."""
        return BACKEND_NAME

    def name(self) -> str:
        """The name under which it was registered."""
        return BACKEND_NAME

    def get_group_store(self) -> Any:
        """The store that the group was made with."""
        return self._store

    # c10d asks a group in Python for its name, and keeps one in the backend for its own records.

    def _set_group_name(self, name: str) -> None:
        self._name = name
        super()._set_group_name(name)  # type: ignore[arg-type]

    def _set_group_desc(self, text: str) -> None:
        self._text = text
        super()._set_group_desc(text)

    def getGroupName(self) -> str:
        """The name under which functional collectives find the group."""
        return self._name

    def getGroupDesc(self) -> str:
        """What the user said that it is for."""
        return self._text

    def _get_sequence_number_for_group(self) -> int:
        return self._started

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to do: every rank counts from zero."""

    @property
    def timeout_s(self) -> float:
        """The deadline of a collective."""
        return self._timeout.total_seconds()

    def split_group(
        self,
        ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> PacelineGroup | None:
        """The group of some of the ranks; None on the others. ``dist.split_group`` calls it.

        Torch's own would split the inner gloo backend, into a group that is not ours. `opts` are
        gloo's and `device_types` can only be the CPU: a Paceline group has no other.
        """
        if self.rank() not in ranks:
            return None
        name = group_name or f"split/{'-'.join(map(str, ranks))}/{self._splits}"
        store = dist.PrefixStore(f"paceline/split/{name}", self._store)  # type: ignore[attr-defined]
        group = PacelineGroup(store, ranks.index(self.rank()), len(ranks), timeout or self._timeout)
        group._set_group_name(name)
        group._set_group_desc(group_desc or f"{self._text}:split:{self._splits}")
        self._splits += 1
        return group

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the deadline of later collectives."""
        self._timeout = timeout
        self._inner.set_timeout(timeout)
        if self._operations is not None:
            self._operations.set_timeout(timeout.total_seconds())

    # --- life ------------------------------------------------------------------------------------

    def let_go(self) -> None:
        """In a forked child: gloo's threads are not here, and its destructor waits for them."""
        keep_for_ever(self)

    def abort(self) -> None:
        """Release every waiter, on all ranks of this host: they raise GroupAbortedError."""
        if not self._owner.is_here():
            raise forked_error(self.rank(), self._owner.pid)
        if self._operations is not None:
            self._operations.abort()

    def shutdown(self) -> None:
        """Leave the group: end threads, close descriptors. Later collectives raise."""
        if self._operations is not None:
            if self._finalizer.alive:
                self._status.leave(sys.exc_info()[1])
            self._finalizer()

    # --- collectives -----------------------------------------------------------------------------

    def _run_watched(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do the same, and let the flight recorder or a profiler know of it."""
        entry = self._recorder.record(self, name, args) if self._recorder is not None else None
        if is_profiled() and name not in UNRECORDED:
            with ProfiledCall(name, args) as profiled:
                work = self._run(name, args, kwargs)
            profiled.follow(work, self._futures)
        else:
            work = self._run(name, args, kwargs)
        if entry is not None:
            entry.follow(work)
        return work

    def _run(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        work = None
        if self._operations is not None:
            work = getattr(self._operations, name)(*args, **kwargs)
        return getattr(self._inner, name)(*args, **kwargs) if work is None else work

    allreduce = _forward("allreduce")
    allreduce_coalesced = _forward("allreduce_coalesced")
    reduce = _forward("reduce")
    broadcast = _forward("broadcast")
    allgather = _forward("allgather")
    allgather_coalesced = _forward("allgather_coalesced")
    all_gather_single = _allgather_base = _forward("all_gather_single")
    all_gather_single_coalesced = allgather_into_tensor_coalesced = _forward(
        "all_gather_single_coalesced"
    )
    reduce_scatter = _forward("reduce_scatter")
    reduce_scatter_single = _reduce_scatter_base = _forward("reduce_scatter_single")
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced = _forward(
        "reduce_scatter_single_coalesced"
    )
    alltoall = _forward("alltoall")
    all_to_all_single = alltoall_base = _forward("all_to_all_single")
    gather = _forward("gather")
    scatter = _forward("scatter")
    barrier = _forward("barrier")
    monitored_barrier = _forward("monitored_barrier")
    send = _forward("send")
    recv = _forward("recv")
    recv_anysource = _forward("recv_anysource")


def _leave(
    operations: HostOperations | CrossHostOperations, connection: Connection, futures: FutureThread
) -> None:
    """End what is under way, then the thread that hears of it. Also when the program ends.

    While the interpreter is taken apart that thread could no longer complete a future.
    """
    operations.close()
    connection.close()
    futures.close()
