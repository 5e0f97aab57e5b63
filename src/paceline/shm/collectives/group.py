"""The ranks of one host as a group: collectives on CPU tensors, through shared memory.

The layer between tensors and the native core: finds addresses, keeps tensors alive while the core
works on them, and raises errors that say what happened. Called by the c10d backend and by the
transport of the DDP wrapper. Must not know about either, nor about other hosts.

Ranks here are places on the host (``index``), not ranks of the group that spans hosts.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.errors import CollectiveError, CollectiveTimeoutError
from paceline.forks import Owner
from paceline.native.extension import native
from paceline.shm.attach.connection import Connection
from paceline.shm.collectives.pending import FORKED, Pending
from paceline.shm.core.dtypes import DTYPES, describe_request, real_view, reduced_code
from paceline.shm.diagnose.errors import ChannelView, closed_error, forked_error, operation_error

NOT_IN_ARENA = native.NOT_IN_ARENA if native is not None else 0
_NOTHING = torch.empty(0, dtype=torch.uint8)
_REDUCING: set[int] = set()
if native is not None:
    _REDUCING = {
        native.KIND_ALL_REDUCE,
        native.KIND_REDUCE,
        native.KIND_REDUCE_SCATTER,
        native.KIND_REDUCE_TO_LEADERS,
    }


@dataclass(frozen=True)
class Call:
    """How a collective is to be run.

    Attributes:
        blocking: The caller waits at once anyway, and may do the work itself.
        timeout_s: The deadline, from when the collective begins; None: the group's.
    """

    blocking: bool = False
    timeout_s: float | None = None


ASYNC = Call()
BLOCKING = Call(blocking=True)


class SharedGroup:
    """One channel of a connection: collectives run one after the other, in the order of calls."""

    def __init__(self, connection: Connection, channel: int, timeout_s: float) -> None:
        self._connection = connection
        self._core = connection.cores[channel]
        self._in_flight: deque[Pending] = deque()
        # Reentrant, like all locks here: a signal handler may close the group at any moment.
        self._lock = threading.RLock()
        self._is_closed = False
        self._owner = Owner()
        self.timeout_s = timeout_s
        self.link = f"{connection.monitor.key}/{channel}"
        self.index = connection.index
        self._me = connection.local[connection.index]
        self.world = len(connection.local)
        self.arena = connection.arena

    # --- collectives -----------------------------------------------------------------------------

    def barrier(self, call: Call = BLOCKING) -> Pending:
        """Wait until all ranks are here."""
        return self._begin(native.KIND_BARRIER, _NOTHING, call)

    def all_reduce(self, tensor: torch.Tensor, op: int, call: Call = ASYNC) -> Pending:
        """Reduce over all ranks, in place; in memory of the arena, without a copy."""
        buffers = _Buffers()
        flat = buffers.inout(real_view(tensor, op))
        offset = self.arena.offset_of(flat)
        return self._begin(
            native.KIND_ALL_REDUCE,
            flat,
            call,
            buffers,
            op=op,
            offset=NOT_IN_ARENA if offset is None else offset,
        )

    def start_all_reduce(self, tensor: torch.Tensor, op: int) -> Pending:
        """Like :meth:`all_reduce`, for a contiguous real tensor: the shortest way."""
        operation = self._hand_in_all_reduce(self._core.start, tensor, op)
        pending = Pending(operation, tensor, (), self._explain)
        self._remember(pending)
        return pending

    def all_reduce_now(self, tensor: torch.Tensor, op: int) -> None:
        """Like :meth:`start_all_reduce` and a wait.

        The calling thread does the work itself, unless something is queued before it.
        """
        operation = self._hand_in_all_reduce(self._core.run, tensor, op)
        if operation.status() != native.STATUS_OK:
            pending = Pending(operation, tensor, (), self._explain)
            self._remember(pending)
            pending.wait()

    def _hand_in_all_reduce(self, begin: Callable[..., Any], tensor: torch.Tensor, op: int) -> Any:
        address, offset = tensor.data_ptr(), self.arena.offset_of(tensor)
        return self._hand_in(
            begin,
            native.KIND_ALL_REDUCE,
            reduced_code(tensor.dtype),
            op,
            0,
            tensor.numel(),
            NOT_IN_ARENA if offset is None else offset,
            (address,),
            (address,),
            (),
            self.timeout_s,
        )

    def reduce(self, tensor: torch.Tensor, op: int, root: int, call: Call = ASYNC) -> Pending:
        """Reduce to one rank, in place there."""
        buffers = _Buffers()
        flat = buffers.inout(real_view(tensor, op))
        return self._begin(native.KIND_REDUCE, flat, call, buffers, op=op, root=root)

    def broadcast(self, tensor: torch.Tensor, root: int, call: Call = ASYNC) -> Pending:
        """Copy one rank's tensor to all."""
        buffers = _Buffers()
        flat = buffers.inout(tensor)
        return self._begin(native.KIND_BROADCAST, flat, call, buffers, root=root)

    def all_gather(
        self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, call: Call = ASYNC
    ) -> Pending:
        """Give every rank the tensors of all, in order."""
        buffers = _Buffers()
        flat = buffers.input(tensor)
        buffers.outputs_of(outputs)
        return self._begin(native.KIND_ALL_GATHER, flat, call, buffers)

    def gather(
        self,
        outputs: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        root: int,
        call: Call = ASYNC,
    ) -> Pending:
        """Give one rank the tensors of all; ``outputs`` is empty elsewhere."""
        buffers = _Buffers()
        flat = buffers.input(tensor)
        buffers.outputs_of(outputs)
        return self._begin(native.KIND_GATHER, flat, call, buffers, root=root)

    def scatter(
        self, tensor: torch.Tensor, inputs: Sequence[torch.Tensor], root: int, call: Call = ASYNC
    ) -> Pending:
        """Give each rank one tensor of the root; ``inputs`` is empty elsewhere."""
        buffers = _Buffers()
        for each in inputs:
            buffers.input(each)
        flat = buffers.output(tensor)
        return self._begin(native.KIND_SCATTER, flat, call, buffers, root=root)

    def reduce_scatter(
        self, tensor: torch.Tensor, inputs: Sequence[torch.Tensor], op: int, call: Call = ASYNC
    ) -> Pending:
        """Reduce one tensor for each rank; ``tensor`` becomes this rank's."""
        buffers = _Buffers()
        for each in inputs:
            buffers.input(real_view(each, op))
        flat = buffers.output(real_view(tensor, op))
        return self._begin(native.KIND_REDUCE_SCATTER, flat, call, buffers, op=op)

    def all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], call: Call = ASYNC
    ) -> Pending:
        """Send ``inputs[i]`` to rank i, receive ``outputs[i]`` from it; sizes may differ."""
        buffers = _Buffers()
        sent = [buffers.input(each) for each in inputs]
        buffers.outputs_of(outputs)
        splits = tuple(tensor.nbytes for tensor in (*sent, *outputs))
        return self._begin(native.KIND_ALL_TO_ALL, _NOTHING, call, buffers, splits=splits)

    def reduce_to_leaders(self, tensor: torch.Tensor, leaders: int) -> Pending:
        """Sum in place, slice i to rank i < ``leaders`` only. The tensor lies in the arena."""
        return self._in_arena(native.KIND_REDUCE_TO_LEADERS, tensor, leaders)

    def copy_from_leaders(self, tensor: torch.Tensor, leaders: int) -> Pending:
        """Copy slice i of rank i < ``leaders`` to all. The tensor lies in the arena."""
        return self._in_arena(native.KIND_COPY_FROM_LEADERS, tensor, leaders)

    # --- life ------------------------------------------------------------------------------------

    def abort(self) -> None:
        """End the group for all ranks: everybody who waits raises. From any thread."""
        with self._unforked():
            self._core.abort()
        self.arena.retire()

    def close(self) -> None:
        """Leave the group. What is under way here raises."""
        if not self._owner.is_here():  # a forked child has no part in it, and cannot leave it
            return
        self._is_closed = True
        with self._lock:
            if not all(pending.try_finish() for pending in self._in_flight):
                self.arena.retire()  # peers may be at work in it
        self._core.close()
        self._in_flight.clear()

    def __del__(self) -> None:
        # Before the tensors of what is under way are let go: the core's thread writes to them.
        if hasattr(self, "_core"):
            self._core.close()

    # --- beginning and judging -------------------------------------------------------------------

    def _in_arena(self, kind: int, tensor: torch.Tensor, leaders: int) -> Pending:
        offset = self.arena.offset_of(tensor)
        assert offset is not None
        buffers = _Buffers()
        buffers.inout(tensor)
        op = native.OP_SUM
        return self._begin(kind, tensor, ASYNC, buffers, op=op, root=leaders, offset=offset)

    def _begin(
        self,
        kind: int,
        tensor: torch.Tensor,
        call: Call,
        buffers: _Buffers | None = None,
        *,
        op: int = 0,
        root: int = 0,
        offset: int = NOT_IN_ARENA,
        splits: tuple[int, ...] = (),
    ) -> Pending:
        """Hand a collective to the core; ``tensor`` says dtype and size of one part."""
        buffers = buffers or _Buffers()
        dtype, count = DTYPES.get(tensor.dtype), tensor.numel()
        if dtype is None:
            if kind in _REDUCING:
                reduced_code(tensor.dtype)
            dtype, count = native.DTYPE_U8, tensor.nbytes  # is moved: bytes will do
        timeout_s = self.timeout_s if call.timeout_s is None else call.timeout_s
        inputs, outputs = tuple(buffers.inputs), tuple(buffers.outputs)
        begin = self._core.run if call.blocking else self._core.start
        operation = self._hand_in(
            begin, kind, dtype, op, root, count, offset, inputs, outputs, splits, timeout_s
        )
        pending = Pending(operation, buffers.tensors, buffers.copies, self._explain)
        self._remember(pending)
        return pending

    def _hand_in(self, begin: Callable[..., Any], *arguments: Any) -> Any:
        """Call ``start`` or ``run`` of the core."""
        if self._is_closed:
            raise closed_error(self._me.rank)
        try:
            return begin(*arguments)
        except native.ForkedError:
            raise forked_error(self._me.rank, self._me.pid) from None
        except KeyboardInterrupt:
            self.arena.retire()
            raise

    @contextlib.contextmanager
    def _unforked(self) -> Iterator[None]:
        """Turn the core's refusal to work in a forked child into our error."""
        try:
            yield
        except native.ForkedError:
            raise forked_error(self._me.rank, self._me.pid) from None

    def _remember(self, pending: Pending) -> None:
        """Keep tensors alive for callers who start a collective and forget it.

        A blocking one too: it may have been queued behind others, and its wait be interrupted.
        """
        if not self._in_flight and pending.try_finish():
            return
        with self._lock:
            self._in_flight.append(pending)
            while self._in_flight and self._in_flight[0].try_finish():
                self._in_flight.popleft()

    def _explain(self, pending: Pending, status: int) -> CollectiveError:
        what = describe_request(pending.operation.request())
        if status == FORKED or not self._owner.is_here():
            return forked_error(self._me.rank, self._me.pid)
        if status == native.STATUS_PENDING:
            rank = self._me.rank
            text = f"Rank {rank}: {what} is not done yet. It goes on: wait for it once more."
            return CollectiveTimeoutError(text, rank=rank, missing=(), operation=what)
        if status in (native.STATUS_BROKEN, native.STATUS_SHUT):
            self.arena.retire()
        connection = self._connection
        view = ChannelView(
            self._core, connection.local, self.index, connection.status, connection.deaths
        )
        return operation_error(view, pending.operation)


class _Buffers:
    """Addresses for the core: tensors that are not contiguous are replaced by copies."""

    __slots__ = ("copies", "inputs", "outputs", "tensors")

    def __init__(self) -> None:
        self.inputs: list[int] = []
        self.outputs: list[int] = []
        self.tensors: list[Any] = []
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def input(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
        self.inputs.append(flat.data_ptr())
        self.tensors.append(flat)
        return flat

    def output(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor if tensor.is_contiguous() else torch.empty_like(tensor).contiguous()
        self.outputs.append(flat.data_ptr())
        self.tensors.append(flat)
        if flat is not tensor:
            self.copies.append((tensor, flat))
        return flat

    def outputs_of(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            self.output(tensor)

    def inout(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = self.input(tensor)
        self.outputs.append(self.inputs[-1])
        if flat is not tensor:
            self.copies.append((tensor, flat))
        return flat
