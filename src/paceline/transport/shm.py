"""Reduction in shared memory: buckets lie in memory that the ranks of a host share.

Called by the reducer through :class:`paceline.types.Transport`. The gradient is copied into the
bucket, and that is the only copy: ranks sum each other's buckets in place. What finds no room there
still goes the right way, more slowly.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline.errors import CollectiveError
from paceline.forks import finalize_here
from paceline.liveness import watch_of
from paceline.shm import Connection, SharedGroup
from paceline.shm.attach.connection import describe_rank_end
from paceline.shm.backend.work import FutureThread
from paceline.shm.collectives.chunked import ChunkedReducer
from paceline.shm.collectives.cross_host import CrossHostGroup, count_leaders, leader_ranks
from paceline.shm.collectives.pending import InFlight
from paceline.shm.core.dtypes import OPS
from paceline.torch_private.groups import group_timeout
from paceline.torch_private.profiler import is_profiled, record_inputs, record_until_done
from paceline.transport.c10d import C10dTransport
from paceline.transport.late import LateReduction
from paceline.transport.messages import SharedMessages
from paceline.transport.sparse import start_sparse_sum
from paceline.types import Messages, Reduction

SUM = OPS.get(dist.ReduceOp.SUM, 0)


class ShmReduction:
    """One sum under way."""

    __slots__ = ("_callback", "_in_flight", "_is_recorded")

    def __init__(self, in_flight: InFlight, is_recorded: threading.Event | None = None) -> None:
        self._in_flight = in_flight
        self._is_recorded = is_recorded
        self._callback: Callable[[int], None] | None = None

    def wait(self) -> None:
        """Block until the sum is in the buffer, or raise a CollectiveError that names the rank."""
        self._in_flight.wait()
        if self._is_recorded is not None:
            # Whoever waits may stop the profiler next, which must not happen inside of an event.
            self._is_recorded.wait()
        callback, self._callback = self._callback, None
        if callback is not None:
            callback(self._in_flight.done_ns())

    def is_done(self) -> bool:
        """Poll."""
        return self._in_flight.is_done()

    def on_done(self, callback: Callable[[int], None]) -> None:
        """Tell, inside of :meth:`wait`, when it was done: the native thread runs no Python."""
        self._callback = callback


class ShmTransport:
    """Sums over the ranks of one host, or of several.

    Args:
        connection: Of all ranks of the group.
        group: To make the leader group from, and for messages if there are several hosts.
            Its time-out is the deadline of a reduction.
    """

    late_bytes = 1 << 20
    """A sum up to this size takes less time than to hand it to another thread and back."""

    def __init__(self, connection: Connection, group: dist.ProcessGroup) -> None:
        timeout = group_timeout(group) or dist.default_pg_timeout
        timeout_s = timeout.total_seconds()
        self.rank: int = group.rank()
        self.world: int = group.size()
        self._c10d = C10dTransport(group)
        self.messages: Messages = self._c10d.messages
        self._arena = connection.arena
        connection.monitor.queries.subject = weakref.ref(group)
        self._status = connection.status
        self._group: SharedGroup | None = None
        self._reducer: ChunkedReducer | None = None
        ranks, hosts = len(connection.members), len(connection.hosts)
        if hosts == 1:
            self.name = "shm"
            self.reason = f"{ranks} ranks share the memory of one host"
            self._group = SharedGroup(connection, 0, timeout_s)
            side = SharedGroup(connection, 1, timeout_s)
            self.messages = SharedMessages(side, group)
            part: SharedGroup | CrossHostGroup = self._group
            self._parts: list[SharedGroup | CrossHostGroup] = [part, side]
        else:
            self.name = f"shm+{self._c10d.name}"
            leaders = count_leaders(connection)
            self.reason = (
                f"{ranks} ranks on {hosts} hosts: shared memory inside, {leaders} leaders on each"
            )
            leader_group = _make_leader_group(connection, group, timeout)
            part = CrossHostGroup(connection, leader_group, timeout_s, watch_of(group))
            self._reducer = ChunkedReducer(part)
            self._parts = [part]
        # The watch lasts as long as the group, and must not keep this memory.
        watch_of(group).lost_peers.describe_end = functools.partial(
            describe_rank_end, weakref.ref(connection)
        )
        self._futures = FutureThread()
        self._finalizer = finalize_here(self, _close, part, connection, self._futures)

    def abort(self) -> None:
        """End it for all ranks of this host; who waits raises. From any thread."""
        for part in self._parts:
            part.abort()

    def close(self, error: BaseException | None = None) -> None:
        """Leave: peers are told at once, with the exception. What is under way raises."""
        self._status.leave(error)
        self._finalizer()

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Shared memory as long as there is room, then plain memory."""
        flat = self._arena.allocate(numel, dtype)
        return torch.zeros(numel, dtype=dtype, device=device) if flat is None else flat

    def start(self, flat: torch.Tensor) -> ShmReduction:
        """Sum in place."""
        if not is_profiled():
            return ShmReduction(self._start(flat))
        with record_inputs("c10d::allreduce_", [flat]):
            in_flight = self._start(flat)
            return ShmReduction(in_flight, self._record(in_flight))

    def _start(self, flat: torch.Tensor) -> InFlight:
        in_flight: InFlight
        if self._group is not None:
            sum_up = self._group.all_reduce if flat.is_complex() else self._group.start_all_reduce
            in_flight = sum_up(flat, SUM)
        else:
            assert self._reducer is not None
            in_flight = self._reducer.start(flat)
        return in_flight

    def start_last(self, flat: torch.Tensor) -> Reduction:
        """Leave a small sum to the thread that waits for it: to wake another one costs more."""
        group = self._group
        is_late = flat.nbytes <= self.late_bytes and not flat.is_complex() and not is_profiled()
        if group is None or not is_late:
            return self.start(flat)
        return LateReduction(functools.partial(group.all_reduce_now, flat, SUM))

    def start_all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Reduction:
        """Through the memory of the host, in the order of sums; between hosts by the group."""
        if self._group is None:
            return self._c10d.start_all_to_all(outputs, inputs)
        return ShmReduction(self._group.all_to_all(outputs, inputs))

    def start_sparse(self, gradient: torch.Tensor) -> Reduction:
        """Gather the rows of all ranks, and add them up."""
        return start_sparse_sum(self.messages, gradient)

    def _record(self, in_flight: InFlight) -> threading.Event:
        """Show the profiler how long a sum takes; the native thread cannot tell it."""
        future = record_until_done("shm:all_reduce")
        is_recorded = threading.Event()

        def end() -> None:
            with contextlib.suppress(CollectiveError):  # whoever waits for it hears of it
                in_flight.wait()
            future.set_result(None)
            is_recorded.set()

        self._futures.submit(end)
        return is_recorded


def _close(
    part: SharedGroup | CrossHostGroup, connection: Connection, futures: FutureThread
) -> None:
    part.close()
    connection.close()
    futures.close()


def _make_leader_group(
    connection: Connection, group: dist.ProcessGroup, timeout: timedelta
) -> dist.ProcessGroup | None:
    """Make the c10d group of the leaders with this rank's index; only they take part.

    gloo, whatever the default group is: the slices are CPU tensors.
    """
    if connection.index >= count_leaders(connection):
        return None
    ranks = leader_ranks(connection.hosts, connection.index)
    everybody = dist.get_process_group_ranks(group)
    members = [everybody[rank] for rank in ranks]
    make = functools.partial(
        dist.new_group,
        members,
        timeout=timeout,
        backend="gloo",
        use_local_synchronization=True,
        group_desc="paceline leaders",
    )
    made: dist.ProcessGroup = watch_of(group).call("the making of groups between hosts", make)
    return made
