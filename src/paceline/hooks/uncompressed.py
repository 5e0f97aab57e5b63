"""The hooks without compression: ``allreduce_hook`` and ``noop_hook``.

Called by users, and by other hooks for steps that they do not compress.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from paceline.hooks.interface import (
    HookBucket,
    TensorFuture,
    after,
    comm_hook,
    done,
    group_of,
    start_all_reduce,
)
from paceline.transport.messages import GroupMessages
from paceline.transport.sparse import sum_sparse


def mean_future(group: dist.ProcessGroup, tensor: torch.Tensor) -> TensorFuture:
    """Begin to take the mean of a tensor over all ranks, in place."""
    # Divided first: the sum of float16 gradients may be out of range, the sum of shares is not.
    tensor.div_(group.size())
    if tensor.is_sparse:
        sum_sparse(GroupMessages(group), tensor)
        return done(tensor)
    return after(start_all_reduce(tensor, group), lambda: tensor)


@comm_hook
def allreduce_hook(process_group: dist.ProcessGroup | None, bucket: HookBucket) -> TensorFuture:
    """Take the mean, as without a hook: something to start from, or to wrap.

    Args:
        process_group: The hook's state: what to reduce over; None is the default group.
        bucket: The gradients.
    """
    return mean_future(group_of(process_group), bucket.buffer())


@comm_hook
def noop_hook(_: Any, bucket: HookBucket) -> TensorFuture:
    """Leave every rank its own gradients: shows how fast a step would be without communication."""
    return done(bucket.buffer())
