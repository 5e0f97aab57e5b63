"""Finds updates with gradients whose forward ran under no_sync, and whose backward did not.

The forward decides whether gradients are averaged, so these are not, although the backward looks as
if they were. Told by :mod:`paceline.ddp.agree.drift` about local backward passes and by the reducer
about forwards; it knows nothing of buckets and other ranks.

[Note: at the update] Such a backward alone is no mistake: Accelerate's ``trigger_sync_in_backward``
runs some of them, then one that is synchronised, which averages the sum. What is wrong is an
optimizer that steps with none in between. Silent stay gradients that were set to None or to zero,
a collective after the backward (gradients may have been averaged by hand), a further backward
inside of no_sync (local on purpose), and a single rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

import torch

from paceline.errors import BackwardOutsideNoSyncError
from paceline.torch_private.groups import collectives_of_all_groups


class Switched(Protocol):
    """A wrapper, as far as this file knows it."""

    require_backward_grad_sync: bool


class NoSyncGuard:
    """One wrapper's local backward passes since its last synchronised one."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._wrapper: weakref.ref[Switched] | None = None
        self._rank = 0
        self._ranks = 1
        self._collectives = 0
        self.clear()

    def clear(self) -> None:
        """Forget what was local: it has been averaged, or applied."""
        self._inside = self._outside = 0

    def note_forward(self, wrapper: Switched, rank: int, ranks: int) -> None:
        """A forward has run under no_sync."""
        if self._wrapper is None:
            self._wrapper = weakref.ref(wrapper)
        self._rank, self._ranks = rank, ranks

    def note_backward(self) -> bool:
        """Note a local backward of such a forward; return whether it ran outside of no_sync."""
        wrapper = self._wrapper() if self._wrapper is not None else None
        if wrapper is None or not wrapper.require_backward_grad_sync:
            self._inside += 1
            return False
        self._outside += 1
        self._collectives = collectives_of_all_groups()
        return True

    def check(self) -> None:
        """An optimizer steps.

        Raises:
            BackwardOutsideNoSyncError: With gradients that nobody has averaged ([Note: at the
                update]).
        """
        if not self._outside or self._inside or self._ranks == 1:
            return
        if collectives_of_all_groups() != self._collectives or not self._has_gradients():
            return
        raise BackwardOutsideNoSyncError(
            f"Rank {self._rank}: this optimizer step uses gradients of this rank alone. Their "
            "forward ran inside of `with ddp.no_sync():` and their backward outside. The forward "
            "decides, so they were not averaged, and no synchronised backward has followed. Leave "
            "no_sync() for the last forward before optimizer.step(). If you want local gradients, "
            "run the backward inside of no_sync(), too."
        )

    def _has_gradients(self) -> bool:
        gradients = (parameter.grad for parameter in self._parameters)
        return any(
            g is not None and (g.layout is not torch.strided or bool(g.count_nonzero()))
            for g in gradients
        )
