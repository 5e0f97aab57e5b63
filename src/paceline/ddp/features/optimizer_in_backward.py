"""Optimizer in backward: the step of a parameter runs as soon as its bucket is reduced.

For parameters that ``torch.distributed.optim._apply_optimizer_in_backward`` has given an optimizer.
Their gradients are None afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

import torch

from paceline.buckets import Bucket
from paceline.torch_private.autograd import optimizer_hook_handles


def take_over_optimizers(parameters: Iterable[torch.Tensor]) -> bool:
    """Stop these parameters' own optimizer hooks; say whether there are any.

    The hooks would run on local gradients, before the reduction.
    """
    found = False
    for parameter in parameters:
        if hasattr(parameter, "_in_backward_optimizers"):
            found = True
            for handle in optimizer_hook_handles(parameter):
                handle.remove()
    return found


class OptimizersInBackward:
    """Steps parameters bucket by bucket; a consumer of the reducer's buckets.

    Attributes:
        is_active: Whether some parameter has an optimizer.
    """

    def __init__(self) -> None:
        self.is_active = False

    def take_over(self, parameters: Iterable[torch.Tensor]) -> None:
        """Run these parameters' optimizers from now on, if there are any."""
        self.is_active = take_over_optimizers(parameters)

    def take(self, bucket: Bucket, left: Set[int]) -> None:
        """Step the parameters of a reduced bucket, but for those that are ``left`` to others."""
        step_parameters(slot.parameter for slot in bucket.slots if slot.index not in left)


def step_parameters(parameters: Iterable[torch.Tensor]) -> None:
    """Step those of the parameters that have an optimizer, and forget their gradients."""
    for parameter in parameters:
        optimizers = getattr(parameter, "_in_backward_optimizers", ())
        if not optimizers:
            continue
        if parameter.grad is not None:
            for optimizer in optimizers:
                optimizer.step()
        parameter.grad = None
