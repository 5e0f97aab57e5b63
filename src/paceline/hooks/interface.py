"""What every hook of ours stands on: the bucket as both wrappers hand it out, and the group.

Called by all hooks. Knows nothing about how a bucket is compressed, and nothing about wrappers:
torch's buckets and ours have the same methods.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from paceline.errors import HookInputError
from paceline.hooks.counting import CountingGroup
from paceline.torch_private.groups import default_group
from paceline.torch_private.modules import TorchGradBucket

TensorFuture = torch.futures.Future[torch.Tensor]
"""What a hook returns."""

Group = dist.ProcessGroup | CountingGroup
"""What collectives run on: really, or in a dry run."""

_PIECE = 1 << 18  # bytes for each peer in one collective, on the CPU

F = TypeVar("F")


class HookBucket(Protocol):
    """A bucket as hooks see it: torch's ``dist.GradBucket`` and ours."""

    def index(self) -> int: ...
    def buffer(self) -> torch.Tensor: ...
    def gradients(self) -> list[torch.Tensor]: ...
    def parameters(self) -> list[torch.Tensor]: ...
    def is_last(self) -> bool: ...
    def set_buffer(self, buffer: torch.Tensor) -> None: ...


def comm_hook(function: F) -> F:
    """Mark a function as a hook that torch's DDP takes too.

    torch compares the annotations with its own classes, and refuses strings, which is what
    postponed annotations are.
    """
    function.__annotations__ = {
        "bucket": TorchGradBucket,
        "return": torch.futures.Future[torch.Tensor],
    }
    return function


def group_of(process_group: Any) -> dist.ProcessGroup:
    """Return the group to use: the given one, or the default group for None."""
    return default_group() if process_group is None else process_group


def check_gradients(hook: str, bucket: HookBucket, *, allow_complex: bool = True) -> torch.Tensor:
    """Return a bucket's buffer, if it is dense and of floating-point numbers.

    Raises:
        HookInputError: If it is not, with what to do.
    """
    buffer = bucket.buffer()
    kind = None
    if buffer.layout is not torch.strided:
        kind = "sparse"
    elif not (buffer.is_floating_point() or (allow_complex and buffer.is_complex())):
        kind = str(buffer.dtype).removeprefix("torch.")
    if kind is not None:
        shapes = ", ".join(str(tuple(p.shape)) for p in bucket.parameters()[:3])
        raise HookInputError(
            f"{hook} works on dense floating-point gradients, but bucket {bucket.index()} is "
            f"{kind} (parameters of shape {shapes}). Use allreduce_hook for this model, or keep "
            "these parameters out of the wrapper.",
            operation=f"{hook} of bucket {bucket.index()}",
        )
    return buffer


def failed_future(future: torch.futures.Future[Any], error: Exception) -> None:
    """Let a future end with an error. Whoever waits in C++ sees it only through :func:`raising`."""
    future.set_exception(error)


def raising(future: TensorFuture) -> TensorFuture:
    """Return a future that raises what was set by :func:`failed_future`, in C++ too."""
    checked: TensorFuture = future.then(lambda ended: ended.wait())
    return checked


def done(value: torch.Tensor) -> TensorFuture:
    """Return a future that holds its result already."""
    future: TensorFuture = torch.futures.Future()
    future.set_result(value)
    return future


def after(future: torch.futures.Future[Any], finish: Callable[[], torch.Tensor]) -> TensorFuture:
    """Return a future of what ``finish`` returns, once ``future`` is done; errors are passed on."""

    def check_and_finish(ended: torch.futures.Future[Any]) -> torch.Tensor:
        ended.wait()
        return finish()

    return future.then(check_and_finish)


def start_all_reduce(tensor: torch.Tensor, group: Group) -> torch.futures.Future[Any]:
    """Begin to sum a tensor over all ranks, in place."""
    if isinstance(group, CountingGroup):
        return group.count(tensor, 2 * (group.size() - 1) / group.size())
    work = dist.all_reduce(tensor, group=group, async_op=True)
    return _future(work)


def start_all_to_all(
    output: torch.Tensor, source: torch.Tensor, group: Group
) -> torch.futures.Future[Any]:
    """Begin to send row r of ``source`` to rank r; row r of ``output`` comes from rank r."""
    if isinstance(group, CountingGroup):
        output.copy_(source.view_as(output))
        return group.count(source, (group.size() - 1) / group.size())
    if source.device.type == "cpu" and source.shape[1] > _PIECE:
        return _start_in_pieces(output, source, group)
    work = dist.all_to_all_single(output.view(-1), source.view(-1), group=group, async_op=True)
    return _future(work)


def _start_in_pieces(
    output: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup
) -> torch.futures.Future[Any]:
    """Send long rows in pieces; the group works on two of them at a time.

    gloo hands a whole row to the socket at once, and a slow link's queue overflows: on 100 Mbit/s,
    rows of 4 MB went at 31 to 92 Mbit/s, and pieces of them at 90 to 100.
    """
    pieces = [part.contiguous() for part in source.split(_PIECE, dim=1)]
    arrived = [torch.empty_like(piece) for piece in pieces]
    works = [
        dist.all_to_all_single(into.view(-1), piece.view(-1), group=group, async_op=True)
        for into, piece in zip(arrived, pieces, strict=True)
    ]

    def put_together(ended: torch.futures.Future[Any]) -> torch.Tensor:
        for future in ended.value():
            future.wait()
        for into, part in zip(arrived, output.split(_PIECE, dim=1), strict=True):
            part.copy_(into)
        return output

    joined: torch.futures.Future[Any] = torch.futures.collect_all(list(map(_future, works)))
    together: torch.futures.Future[Any] = joined.then(put_together)
    return together


def start_all_gather(
    output: torch.Tensor, mine: torch.Tensor, group: Group
) -> torch.futures.Future[Any]:
    """Begin to collect one row from every rank into the rows of ``output``.

    gloo's all-gather copies everything twice more: the same rows as an all-to-all of copies take
    half its time, and the same bytes go over the wire.
    """
    if mine.device.type == "cpu":
        copies = mine.expand(output.shape[0], -1).contiguous()
        return start_all_to_all(output, copies, group)
    work = dist.all_gather_single(output.view(-1), mine, group=group, async_op=True)
    return _future(work)


def _future(work: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = work.get_future()
    return future
