"""All-reduce over several hosts: inside each host through shared memory, between them by leaders.

[Note: leaders]
If every host has at least n ranks, the first n ranks of each host are its leaders. A tensor is cut
into n slices. Each host sums slice i into its leader i (``reduce_to_leaders``), the leaders i of
all hosts sum it (a c10d all-reduce in their leader group, all groups at once), and every rank
copies all slices from its host's leaders (``copy_from_leaders``). So a slice crosses the network
once for each host, not once for each rank.

The two steps inside the host are on different channels: while bucket 0 is being shared, bucket 1
may already be reduced, and the order on each channel is the same on all ranks.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import CollectiveTimeoutError, GroupAbortedError
from paceline.liveness import Watch
from paceline.liveness.lost_peers import SLICE_S
from paceline.liveness.wait_guard import WaitGuard
from paceline.native.extension import native
from paceline.shm.attach.connection import Connection
from paceline.shm.collectives.group import SharedGroup
from paceline.shm.collectives.pending import Pending

ACROSS = "all_reduce over hosts"
UNFINISHED = "The sum over several hosts is not done yet. It goes on: wait for it once more."
CLOSE_TIMEOUT_S = 5.0
"""How long :meth:`CrossHostGroup.close` waits for a leader that waits for another host. The
thread is a daemon, and ends with the leader group's time-out at the latest."""
CHANNELS = 2
"""What a connection needs here: one for each of the two steps inside the host."""


def count_leaders(connection: Connection) -> int:
    """How many ranks every host has at least."""
    return min(len(host) for host in connection.hosts)


def leader_ranks(hosts: Sequence[Sequence[int]], index: int) -> list[int]:
    """Return the ranks that exchange slice ``index``: one of each host."""
    return [host[index] for host in hosts]


@dataclass
class CrossHostReduction:
    """One all-reduce on its way through the hosts.

    Attributes:
        tensor: In the arena.
        copy_of: What the tensor was copied from, and is copied back to; None: nothing, or done.
        reduced: The sum inside of this host.
        watch: Of the whole group.
        shared: The last step inside of this host.
        error: Why there is no last step.
        is_submitted: The last step has begun, or never will.
    """

    tensor: torch.Tensor
    copy_of: torch.Tensor | None
    reduced: Pending
    watch: Watch
    shared: Pending | None = None
    error: BaseException | None = None
    is_submitted: threading.Event = field(default_factory=threading.Event)
    _lock: Any = field(default_factory=threading.RLock)

    def wait(self, timeout_s: float = -1.0) -> None:
        """Block until the sum over all hosts is in the tensor.

        Raises:
            CollectiveError: If it failed, or did not end within ``timeout_s``.
        """
        if not self.is_submitted.wait(timeout_s if timeout_s >= 0 else None):
            raise CollectiveTimeoutError(UNFINISHED, missing=(), operation="all_reduce")
        if self.error is not None:
            raise self._explain(self.error)
        assert self.shared is not None
        try:
            self.shared.wait(timeout_s)
        except GroupAbortedError as error:
            raise self._explain(error) from error
        with self._lock:
            target, self.copy_of = self.copy_of, None
            if target is not None:
                target.copy_(self.tensor)

    def _explain(self, error: BaseException) -> BaseException:
        """A leader of this host may have given up because a rank of another host is gone."""
        if not isinstance(error, GroupAbortedError):
            return error
        lost = self.watch.roster.first_lost()
        return error if lost is None else self.watch.lost_peers.lost_error(ACROSS, lost)

    def is_done(self) -> bool:
        """Never blocks."""
        if not self.is_submitted.is_set():
            return False
        return self.error is not None or (self.shared is not None and self.shared.is_done())

    def done_ns(self) -> int:
        """When it ended; 0 before."""
        return self.shared.done_ns() if self.shared is not None else 0


class CrossHostGroup:
    """Sums tensors of the arena over several hosts.

    Args:
        connection: With two channels.
        leader_group: The c10d group of the leaders with this rank's index; None: it is no leader.
        timeout_s: For the steps inside the host; the leader group has its own.
        watch: Of the whole group.
    """

    def __init__(
        self,
        connection: Connection,
        leader_group: dist.ProcessGroup | None,
        timeout_s: float,
        watch: Watch,
    ) -> None:
        self._watch = watch
        self._reduce = SharedGroup(connection, 0, timeout_s)
        self._share = SharedGroup(connection, 1, timeout_s)
        self._leaders = count_leaders(connection)
        self._leader_group = leader_group
        self._queue: queue.SimpleQueue[CrossHostReduction | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.arena = connection.arena

    def all_reduce(
        self, tensor: torch.Tensor, copy_of: torch.Tensor | None = None
    ) -> CrossHostReduction:
        """Begin to sum a flat tensor of the arena over all ranks of all hosts, in place.

        Args:
            tensor: In the arena.
            copy_of: Sum this one instead, by way of ``tensor``.
        """
        if copy_of is not None:
            tensor.copy_(copy_of)
        reduced = self._reduce.reduce_to_leaders(tensor, self._leaders)
        reduction = CrossHostReduction(tensor, copy_of, reduced, self._watch)
        if self._thread is None:
            self._make_thread()
        self._queue.put(reduction)
        return reduction

    def set_timeout(self, timeout_s: float) -> None:
        """Change the deadline of later steps, inside the host and between hosts."""
        self._reduce.timeout_s = self._share.timeout_s = timeout_s
        if self._leader_group is not None:
            self._leader_group.set_timeout(timedelta(seconds=timeout_s))

    def abort(self) -> None:
        """End the group for all ranks of this host; other hosts wait for their time-out."""
        self._reduce.abort()
        self._share.abort()

    def close(self) -> None:
        """Leave; what is under way here raises."""
        self._reduce.close()
        self._share.close()
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join(CLOSE_TIMEOUT_S)

    def _make_thread(self) -> None:
        self._thread = threading.Thread(target=self._run, name="paceline-hosts", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (reduction := self._queue.get()) is not None:
            try:
                self._wait_reduced(reduction.reduced)
                self._cross(reduction.tensor)
                reduction.shared = self._share.copy_from_leaders(reduction.tensor, self._leaders)
            except BaseException as error:
                reduction.error = error
                # Peers on this host would wait for a slice that never comes.
                self._share.abort()
            reduction.is_submitted.set()

    def _wait_reduced(self, reduced: Pending) -> None:
        """Wait for the ranks of this host: one may have raised because another host is gone."""
        guard = WaitGuard(self._watch, ACROSS)
        while True:
            try:
                reduced.wait(SLICE_S)
                return
            except CollectiveTimeoutError:
                if reduced.is_done():
                    raise
                guard.check()

    def _cross(self, tensor: torch.Tensor) -> None:
        """Sum this rank's slice over the hosts."""
        if self._leader_group is None:
            return
        begin, end = (
            native.cut(tensor.numel(), self._leaders, self._reduce.index + step, tensor.itemsize)
            for step in (0, 1)
        )
        leaders = self._leader_group
        if begin < end:
            self._watch.run(ACROSS, lambda: leaders.allreduce([tensor[begin:end]]))
