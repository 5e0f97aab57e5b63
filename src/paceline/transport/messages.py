"""What a wrapper sends besides gradients: buffers, agreements, the first state of the model.

Through shared memory where all ranks of the group share it, on a channel of its own, because these
messages have no order among the buckets; otherwise over the process group, watched. Either way a
rank that dies is named. Implementations of :class:`paceline.types.Messages`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
import torch.distributed as dist

from paceline.liveness import gather_all, watch_of
from paceline.shm import SharedGroup
from paceline.shm.collectives.group import BLOCKING
from paceline.shm.core.dtypes import OPS
from paceline.torch_private.autograd import copy_all
from paceline.types import Messages


class GroupMessages:
    """Over a c10d group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._watch = watch_of(group)
        self.rank: int = group.rank()
        self.world: int = group.size()

    def gather(self, what: str, mine: torch.Tensor) -> list[torch.Tensor]:
        """See :class:`paceline.types.Messages`."""
        return gather_all(self._group, mine, what)

    def broadcast(self, what: str, tensor: torch.Tensor, source: int) -> None:
        """See :class:`paceline.types.Messages`."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._watch.run(what, lambda: self._group.broadcast([tensor], options), one_way=True)

    def maximum(self, what: str, tensor: torch.Tensor) -> None:
        """See :class:`paceline.types.Messages`."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self._watch.run(what, lambda: self._group.allreduce([tensor], options))


class SharedMessages:
    """Through the memory of one host; what is not on the CPU goes over the process group."""

    def __init__(self, shared: SharedGroup, group: dist.ProcessGroup) -> None:
        self._shared = shared
        self._plain = GroupMessages(group)
        self.rank, self.world = self._plain.rank, self._plain.world

    def gather(self, what: str, mine: torch.Tensor) -> list[torch.Tensor]:
        """See :class:`paceline.types.Messages`."""
        if mine.device.type != "cpu":
            return self._plain.gather(what, mine)
        out = [torch.empty_like(mine) for _ in range(self.world)]
        self._shared.all_gather(out, mine, BLOCKING).wait()
        return out

    def broadcast(self, what: str, tensor: torch.Tensor, source: int) -> None:
        """See :class:`paceline.types.Messages`."""
        if tensor.device.type != "cpu":
            self._plain.broadcast(what, tensor, source)
            return
        self._shared.broadcast(tensor, source, BLOCKING).wait()

    def maximum(self, what: str, tensor: torch.Tensor) -> None:
        """See :class:`paceline.types.Messages`."""
        if tensor.device.type != "cpu":
            self._plain.maximum(what, tensor)
            return
        self._shared.all_reduce(tensor, OPS[dist.ReduceOp.MAX], BLOCKING).wait()


def broadcast_tensors(
    messages: Messages,
    what: str,
    tensors: Sequence[torch.Tensor],
    chunk_bytes: int,
    source: int,
    *,
    fills: bool = True,
) -> None:
    """Copy tensors from one rank to all, many in one message.

    Without ``fills`` this rank takes part, and keeps its own.
    """
    for chunk in _chunks(tensors, chunk_bytes):
        first = chunk[0]
        numel = sum(tensor.numel() for tensor in chunk)
        if messages.rank == source:
            flat = torch.cat([tensor.reshape(-1) for tensor in chunk])
        else:
            flat = torch.empty(numel, dtype=first.dtype, device=first.device)
        messages.broadcast(what, flat, source)
        if messages.rank != source and fills:
            parts = flat.split([tensor.numel() for tensor in chunk])
            pairs = zip(parts, chunk, strict=True)
            copy_all(chunk, [part.view(tensor.shape) for part, tensor in pairs])


def _chunks(tensors: Sequence[torch.Tensor], chunk_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Tensors of one dtype and device together, at most ``chunk_bytes`` if there are several."""

    def kind(tensor: torch.Tensor) -> tuple[str, str]:
        return str(tensor.dtype), str(tensor.device)

    carried = [_carried(tensor.detach()) for tensor in tensors if tensor.numel()]
    for _, same in groupby(sorted(carried, key=kind), key=kind):
        chunk: list[torch.Tensor] = []
        chunk_size = 0
        for tensor in same:
            if chunk and chunk_size + tensor.nbytes > chunk_bytes:
                yield chunk
                chunk, chunk_size = [], 0
            chunk.append(tensor)
            chunk_size += tensor.nbytes
        yield chunk


def _carried(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a dtype that every group can carry."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    if tensor.itemsize == 1:
        return tensor.view(torch.uint8)  # float8 and bool too
    return tensor
