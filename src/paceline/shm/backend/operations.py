"""c10d's operations on the shared-memory group: options, lists of tensors, checks.

Every method takes c10d's arguments and returns a ``Work``, or None if the inner group is to do it.
That depends only on what all ranks have in common: dtype, operation, layout, the number of hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import CollectiveTimeoutError
from paceline.shm.attach.connection import Connection
from paceline.shm.backend.input_checks import InputChecks, Tensors, check_cpu
from paceline.shm.backend.work import FutureThread, SharedWork
from paceline.shm.collectives.chunked import ChunkedReducer
from paceline.shm.collectives.cross_host import CrossHostGroup
from paceline.shm.collectives.group import Call, SharedGroup
from paceline.shm.collectives.pending import Pending
from paceline.shm.core.dtypes import OPS, can_reduce

SUM = dist.ReduceOp.SUM


class Operations:
    """All operations, each left to the inner group; those that a subclass has are not."""

    def _leave_to_inner(self, *_: Any, **__: Any) -> Any:
        """Return None."""

    allreduce = allreduce_coalesced = reduce = _leave_to_inner
    reduce_scatter = reduce_scatter_single = reduce_scatter_single_coalesced = _leave_to_inner
    broadcast = gather = scatter = allgather = allgather_coalesced = _leave_to_inner
    all_gather_single = all_gather_single_coalesced = _leave_to_inner
    alltoall = all_to_all_single = _leave_to_inner
    barrier = monitored_barrier = _leave_to_inner
    send = recv = recv_anysource = _leave_to_inner


class HostOperations(Operations):
    """All ranks on one host: everything but point to point and sparse tensors."""

    def __init__(self, connection: Connection, futures: FutureThread, timeout_s: float) -> None:
        self._group = SharedGroup(connection, 0, timeout_s)
        self._futures = futures
        self._rank = self._group.index
        self._check = InputChecks(self._group.index, self._group.world)

    def set_timeout(self, timeout_s: float) -> None:
        """Change the deadline of later collectives."""
        self._group.timeout_s = timeout_s

    def abort(self) -> None:
        """Release every waiter."""
        self._group.abort()

    def close(self) -> None:
        """Leave the group."""
        self._group.close()

    # --- reductions ------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any = None) -> SharedWork | None:
        """Reduce over all ranks, in place."""
        op, call = _op(opts), _call(opts)
        if not _can_reduce(tensors, op):
            return None
        return self._work([self._group.all_reduce(t, op, call) for t in tensors], tensors, call)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> SharedWork | None:
        """Reduce to one rank, in place."""
        op, call = _op(opts), _call(opts)
        root = self._check.root("reduce", opts.rootRank)
        if not _can_reduce(tensors, op):
            return None
        return self._work([self._group.reduce(t, op, root, call) for t in tensors], tensors, call)

    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None
    ) -> SharedWork | None:
        """Reduce one tensor for each rank."""
        op, call = _op(opts), _call(opts)
        if not _can_reduce(outputs, op):
            return None
        pairs = list(zip(outputs, inputs, strict=True))
        for output, parts in pairs:
            self._check.parts("reduce_scatter", parts, output)
        pendings = [self._group.reduce_scatter(o, parts, op, call) for o, parts in pairs]
        return self._work(pendings, outputs, call)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> SharedWork | None:
        """Like :meth:`reduce_scatter`, from tensors that hold all parts."""
        pairs = zip(outputs, inputs, strict=True)
        parts = [self._check.cut("reduce_scatter", large, small) for small, large in pairs]
        return self.reduce_scatter(outputs, parts, opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> SharedWork | None:
        """One of :meth:`reduce_scatter_single_coalesced`."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    # --- copies ----------------------------------------------------------------------------------

    def broadcast(self, tensors: Tensors, opts: Any) -> SharedWork | None:
        """Copy one rank's tensors to all."""
        call, root = _call(opts), self._check.root("broadcast", opts.rootRank)
        check_cpu(tensors)
        return self._work([self._group.broadcast(t, root, call) for t in tensors], tensors, call)

    def allgather(
        self, outputs: Sequence[Tensors], tensors: Tensors, opts: Any = None
    ) -> SharedWork | None:
        """Give every rank everybody's tensors: one list of outputs for each tensor."""
        call = _call(opts)
        pairs = list(zip(outputs, tensors, strict=True))
        for parts, tensor in pairs:
            self._check.parts("all_gather", parts, tensor)
        pendings = [self._group.all_gather(parts, tensor, call) for parts, tensor in pairs]
        return self._work(pendings, [part for parts in outputs for part in parts], call)

    def allgather_coalesced(
        self, outputs: Sequence[Tensors], tensors: Tensors, opts: Any = None
    ) -> SharedWork | None:
        """Like :meth:`allgather`, with one list of outputs for each rank."""
        by_tensor = [[parts[i] for parts in outputs] for i in range(len(tensors))]
        return self.allgather(by_tensor, tensors, opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, tensors: Tensors, opts: Any = None
    ) -> SharedWork | None:
        """Like :meth:`allgather`, into tensors that hold all parts."""
        pairs = zip(outputs, tensors, strict=True)
        parts = [self._check.cut("all_gather", large, small) for large, small in pairs]
        return self.allgather(parts, tensors, opts)

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> SharedWork | None:
        """One of :meth:`all_gather_single_coalesced`."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def gather(self, outputs: Sequence[Tensors], tensors: Tensors, opts: Any) -> SharedWork | None:
        """Give one rank everybody's tensor."""
        call, root = _call(opts), self._check.root("gather", opts.rootRank)
        parts = outputs[0] if self._rank == root else []
        if self._rank == root:
            self._check.parts("gather", parts, tensors[0])
        return self._work([self._group.gather(parts, tensors[0], root, call)], parts, call)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> SharedWork | None:
        """Give each rank one tensor of the root."""
        call, root = _call(opts), self._check.root("scatter", opts.rootRank)
        parts = inputs[0] if self._rank == root else []
        if self._rank == root:
            self._check.parts("scatter", parts, outputs[0])
        return self._work([self._group.scatter(outputs[0], parts, root, call)], outputs, call)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> SharedWork | None:
        """Exchange tensors: the i-th goes to rank i. Sizes may differ."""
        call = _call(opts)
        self._check.count("all_to_all input", inputs)
        self._check.count("all_to_all output", outputs)
        check_cpu([*inputs, *outputs])
        return self._work([self._group.all_to_all(outputs, inputs, call)], outputs, call)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
    ) -> SharedWork | None:
        """Exchange rows of one tensor."""
        outputs = self._check.split("output", output, output_splits)
        return self.alltoall(outputs, self._check.split("input", tensor, input_splits), opts)

    # --- barriers --------------------------------------------------------------------------------

    def barrier(self, opts: Any = None) -> SharedWork | None:
        """Wait for all ranks."""
        call = _call(opts)
        return self._work([self._group.barrier(call)], [], call)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> bool:
        """Wait for all ranks; the error at the deadline names every rank that is missing.

        All of them are named with or without ``wait_all_ranks``.
        """
        del wait_all_ranks
        timeout_s = timeout.total_seconds() if timeout else self._group.timeout_s
        try:
            self._group.barrier(Call(blocking=True, timeout_s=timeout_s)).wait()
        except CollectiveTimeoutError as error:
            raise self._not_passed(error, timeout_s) from None
        return True

    def _not_passed(
        self, error: CollectiveTimeoutError, timeout_s: float
    ) -> CollectiveTimeoutError:
        """The same, in torch's words first."""
        who = f"Rank{'s' * (len(error.missing) > 1)} {', '.join(map(str, error.missing))}"
        return CollectiveTimeoutError(
            f"[Rank {self._rank}]: {who} failed to pass monitoredBarrier in "
            f"{round(1000 * timeout_s)} ms. {error}",
            rank=error.rank,
            missing=error.missing,
            operation=error.operation,
        )

    def _work(self, pendings: list[Pending], result: Tensors, call: Call) -> SharedWork:
        work = SharedWork(pendings, list(result), self._futures)
        if call.blocking:
            work.wait()
        return work


class CrossHostOperations(Operations):
    """Ranks on several hosts: sums go through shared memory, the rest through the inner group."""

    def __init__(self, group: CrossHostGroup, futures: FutureThread) -> None:
        self._group = group
        self._reducer = ChunkedReducer(group)
        self._futures = futures

    def set_timeout(self, timeout_s: float) -> None:
        """Change the deadline of later collectives."""
        self._group.set_timeout(timeout_s)

    def abort(self) -> None:
        """Release every waiter on this host."""
        self._group.abort()

    def close(self) -> None:
        """Leave the group."""
        self._group.close()

    def allreduce(self, tensors: Tensors, opts: Any = None) -> SharedWork | None:
        """Sum over all ranks, in place; other operations are the inner group's."""
        if not _can_reduce(tensors, _op(opts)) or _op(opts) != OPS[SUM]:
            return None
        work = SharedWork([self._reducer.start(t) for t in tensors], list(tensors), self._futures)
        if _call(opts).blocking:
            work.wait()
        return work

    allreduce_coalesced = allreduce


def _op(opts: Any) -> int:
    """Return the core's code of an operation; -1 for one it does not know."""
    return OPS.get(opts.reduceOp.op, -1) if opts is not None else OPS[SUM]


def _call(opts: Any) -> Call:
    if opts is None:
        return Call()
    timeout_s = opts.timeout.total_seconds()
    return Call(blocking=not opts.asyncOp, timeout_s=timeout_s if timeout_s > 0 else None)


def _can_reduce(tensors: Tensors, op: int) -> bool:
    check_cpu(tensors)
    return all(
        tensor.layout == torch.strided and can_reduce(tensor.dtype, op) for tensor in tensors
    )
