"""Where gradients live outside of the buckets: in ``parameter.grad``, or in an autograd context.

The reducer copies gradients in (``copy_in``) and results out (``publish``) through one of these.
Must not know about groups, hooks or the order of buckets.

[Note: scaling]
A gradient is scaled on its way into its slot, by whoever copies it there. That is its hook
(``native/wrapper/copy_in.c``), or :meth:`GradientAccess.copy_in` (below; with mixed precision that
of precision.py); a sparse gradient has no slot and is scaled by ``copy_in_sparse`` (sparse.py).
``step.factor`` alone says how:

    1 / ranks   the mean (or the ranks that still have inputs, under ``join``)
    1           a communication hook divides (torch's built-in ones: comm_hook.py), or does not
    n / unit    ``weighted(n)``; ``weights.py`` has the sum divided (``Bucket.scale``, bucket.py)
    0           ``weighted(0)``: the slot is cleared and the gradient is not read, it may be NaN
    1 or n      logical shards: below

So whatever lies in a slot is scaled, and nobody has to ask. Elsewhere are scaled

    delayed parameters, which are in no bucket: by delayed.py
    logical shards, below the root of the tree ([Note: the mean] in shards/sums.py): by
    shard_sums.py and sums.py what this rank adds up, by tree_sum.py what ranks add up together;
    before a cast, all of them: by cast.py. With weights, which come before: shard_sums.py, which
    also has the sum divided at the end
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Protocol

import torch

from paceline.buckets import Slot
from paceline.config import GradientViews
from paceline.shm.collectives.streaming import scale_into
from paceline.torch_private.autograd import context_gradients


class GradientAccess(Protocol):
    """How the reducer reaches gradients.

    Attributes:
        keeps_gradients: The outside keeps its gradients until the step is over, whatever is done
            here: to copy them in early saves no memory.
        is_direct: A gradient is ``parameter.grad``, and its slot's view may take its place at once:
            the hook that tells of it can copy it in.
        exchanges_data: Parameters have other data, of another dtype, while a step runs.
    """

    keeps_gradients: bool
    is_direct: bool
    exchanges_data: bool

    def gradient(self, slot: Slot) -> torch.Tensor | None:
        """Return the gradient as it is outside now."""

    def has_gradient(self, slot: Slot) -> bool:
        """Say whether there was a gradient when this slot was last copied in, in this step."""

    def copy_in(self, slots: Sequence[Slot], factor: float) -> list[Slot]:
        """Let the slots hold their gradients times ``factor``, which is not zero.

        Returns:
            The slots that are to be published after the reduction: the outside does not show their
            views yet.
        """

    def publish(self, slots: Sequence[Slot]) -> None:
        """Let the outside show the views of these slots."""

    def publish_sparse(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Let the outside show a reduced sparse gradient."""


class LocalAccess:
    """Gradients in ``parameter.grad``."""

    keeps_gradients = False
    exchanges_data = False

    def __init__(self, views: GradientViews) -> None:
        self._gives_views = self.is_direct = views is not GradientViews.NEVER

    def gradient(self, slot: Slot) -> torch.Tensor | None:
        """Return ``parameter.grad``."""
        return slot.parameter.grad

    def has_gradient(self, slot: Slot) -> bool:
        """A slot without a gradient is not given one before it is published."""
        return slot.parameter.grad is not None

    def copy_in(self, slots: Sequence[Slot], factor: float) -> list[Slot]:
        """Copy what is not in its view yet; give out views where that is allowed."""
        empty: list[Slot] = []
        held: list[Slot] = []
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for slot in slots:
            view, gradient = slot.view, slot.parameter.grad
            if gradient is None or view is None:
                slot.zero()
                empty.append(slot)
            else:
                held.append(slot)
                targets.append(view)
                sources.append(gradient)
        copy_scaled(targets, sources, factor)
        gives_views = self._gives_views and not any(map(_requires_grad, sources))
        for slot, view, gradient in zip(held, targets, sources, strict=True):
            if gradient is view:
                continue
            if gives_views and not slot.is_shared:
                slot.parameter.grad = view
            else:
                empty.append(slot)
        return empty

    def publish(self, slots: Sequence[Slot]) -> None:
        """Give out views, or copy the results to tensors that cannot be views."""
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for slot in slots:
            view, gradient = slot.view, slot.parameter.grad
            assert view is not None
            if gradient is view:
                continue
            if gradient is None:
                slot.parameter.grad = view if self._gives_views else view.clone()
            elif self._gives_views and not gradient.requires_grad:
                slot.parameter.grad = view
            else:
                # A gradient with a graph (create_graph=True) stays the tensor that the graph knows.
                targets.append(gradient)
                sources.append(view)
        copy_scaled(targets, sources, 1.0)

    def publish_sparse(self, slot: Slot, gradient: torch.Tensor) -> None:
        """The reduced tensor becomes the gradient."""
        slot.parameter.grad = gradient


class ContextAccess:
    """Gradients in a distributed autograd context, which ``DistributedOptimizer`` reads.

    The context's tensors cannot be replaced, only written to. A parameter that this rank did not
    use has one because it was attached to the output (attach_unused.py).

    To ask the context means to convert all its gradients to Python: it is asked when gradients have
    arrived, and what it said last holds until the results are shown, at the end of the step.
    """

    keeps_gradients = True
    is_direct = False
    exchanges_data = False

    def __init__(self, context_id: int) -> None:
        self._context_id = context_id
        self._known: dict[torch.Tensor, torch.Tensor] = {}

    def gradient(self, slot: Slot) -> torch.Tensor | None:
        """Return the context's gradient of this parameter."""
        self._known = context_gradients(self._context_id)
        return self._known.get(slot.parameter)

    def has_gradient(self, slot: Slot) -> bool:
        """Whether the context had one when it was last asked."""
        return slot.parameter in self._known

    def copy_in(self, slots: Sequence[Slot], factor: float) -> list[Slot]:
        """Copy from the context; all is to be published."""
        gradients = self._known = context_gradients(self._context_id)
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for slot in slots:
            gradient = gradients.get(slot.parameter)
            if gradient is None or slot.view is None:
                slot.zero()
            else:
                targets.append(slot.view)
                sources.append(gradient)
        copy_scaled(targets, sources, factor)
        return list(slots)

    def publish(self, slots: Sequence[Slot]) -> None:
        """Write the results into the context's tensors."""
        found = [(self._known.get(slot.parameter), slot.view) for slot in slots]
        shown = [(own, view) for own, view in found if own is not None and view is not None]
        copy_scaled([own for own, _ in shown], [view for _, view in shown], 1.0)

    def publish_sparse(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Write a sparse result into the context's tensor."""
        own = self._known.get(slot.parameter)
        if own is not None:
            own.copy_(gradient)


_requires_grad = attrgetter("requires_grad")


def copy_scaled(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], factor: float
) -> None:
    """``target = source * factor`` for every pair; a target may be its own source.

    A single one is read and written once. Several are copied in one call, and then scaled in place:
    for small ones, whose calls cost more than their copies.
    """
    if len(targets) == 1:
        _copy_one_scaled(targets[0], sources[0], factor)
        return
    pairs = [(t, s) for t, s in zip(targets, sources, strict=True) if t is not s]
    if pairs:
        torch._foreach_copy_([t for t, _ in pairs], [s for _, s in pairs])
    if factor != 1.0 and targets:
        _scale_all(targets, factor)


def _scale_all(targets: Sequence[torch.Tensor], factor: float) -> None:
    # On the CPU, _foreach_mul_ rounds the factor to float16 or bfloat16 first; mul_ does not.
    if all(target.itemsize >= 4 or not target.is_cpu for target in targets):
        torch._foreach_mul_(list(targets), factor)
        return
    for target in targets:
        target.mul_(factor)


def _copy_one_scaled(target: torch.Tensor, source: torch.Tensor, factor: float) -> None:
    if source is not target:
        if factor != 1.0 and source.dtype is target.dtype:
            scale_into(target, source, factor)
            return
        target.copy_(source)
    if factor != 1.0:
        target.mul_(factor)
