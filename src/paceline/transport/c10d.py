"""Reduction over any c10d group: gloo, NCCL, MPI, UCC, or a group written by somebody else.

Called by the reducer through :class:`paceline.types.Transport`. Must not know about parameters,
buckets or steps: it sums flat tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.liveness import Watch, watch_of
from paceline.transport.messages import GroupMessages
from paceline.transport.sparse import as_bytes, start_sparse_sum
from paceline.types import Messages, Reduction


class C10dReduction:
    """One c10d ``Work``."""

    __slots__ = ("_watch", "_work")

    def __init__(self, work: Any, watch: Watch) -> None:
        self._work = work
        self._watch = watch

    def wait(self) -> None:
        """Block until done; the group's own time-out is the deadline."""
        self._watch.wait("all_reduce over the process group", self._work)

    def is_done(self) -> bool:
        """Poll the work."""
        return bool(self._work.is_completed())

    def on_done(self, callback: Callable[[int], None]) -> None:
        """Run ``callback`` on the backend's thread when the work completes."""
        future = self._work.get_future()
        future.add_done_callback(lambda _: callback(time.perf_counter_ns()))


class C10dExchange:
    """Tensors on their way from each rank to each."""

    __slots__ = ("_outputs", "_received", "_reduction")

    def __init__(
        self,
        group: dist.ProcessGroup,
        watch: Watch,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
    ) -> None:
        sent = torch.cat([as_bytes(each) for each in inputs])
        sizes = [each.nbytes for each in outputs]
        received = sent.new_empty(sum(sizes))
        work = watch.start(
            "all_to_all over the process group",
            lambda: group.alltoall_base(received, sent, sizes, [each.nbytes for each in inputs]),
        )
        self._reduction = C10dReduction(work, watch)
        self._outputs: Sequence[torch.Tensor] = outputs
        self._received = received.split(sizes)

    def wait(self) -> None:
        """Block until all is here."""
        self._reduction.wait()
        for output, received in zip(self._outputs, self._received, strict=True):
            output.copy_(received.view(output.dtype))
        self._outputs, self._received = (), ()

    def is_done(self) -> bool:
        """Poll the work."""
        return self._reduction.is_done()

    def on_done(self, callback: Callable[[int], None]) -> None:
        """Run ``callback`` when all has arrived."""
        self._reduction.on_done(callback)


class C10dTransport:
    """Sums over a c10d process group."""

    late_bytes = 1 << 20
    """To start a bucket of this size from a backward takes as long as the sum: threads meet."""

    def __init__(self, group: dist.ProcessGroup, reason: str = "") -> None:
        self._group = group
        self.reason = reason
        self.rank: int = group.rank()
        self.world: int = group.size()
        self.name = f"c10d:{dist.get_backend(group)}"
        self.messages: Messages = GroupMessages(group)
        self._watch = watch_of(group)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Plain memory: c10d takes any tensor."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def start(self, flat: torch.Tensor) -> C10dReduction:
        """All-reduce (sum) in place."""
        work = self._watch.start(
            "all_reduce over the process group", lambda: self._group.allreduce([flat])
        )
        return C10dReduction(work, self._watch)

    def start_last(self, flat: torch.Tensor) -> C10dReduction:
        """At once: it goes on while backward ends."""
        return self.start(flat)

    def start_all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Reduction:
        """As bytes, in one message for each pair of ranks."""
        return C10dExchange(self._group, self._watch, outputs, inputs)

    def start_sparse(self, gradient: torch.Tensor) -> Reduction:
        """Gather the rows of all ranks, and add them up."""
        return start_sparse_sum(self.messages, gradient)
