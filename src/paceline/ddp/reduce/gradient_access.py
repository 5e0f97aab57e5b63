"""Where gradients live outside of the buckets: in ``parameter.grad``, or in an autograd context.

The reducer brings gradients in (``collect``) and lets results out (``settle``) through one of
these. A home copies; it must not know about groups, hooks or the order of buckets.

Words: a slot is *settled* when the outside already shows its view, so that nothing is to be done
after the reduction. Slots that are not are returned by ``collect`` and handed to ``settle``
later.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Protocol

import torch

from paceline.buckets import Slot
from paceline.config import GradientViews
from paceline.shm.collectives.streaming import scale_into
from paceline.torch_private import context_gradients


class GradientHome(Protocol):
    """How the reducer reaches gradients.

    Attributes:
        keeps_gradients: The outside keeps its gradients until the step is over, whatever is done
            here: to bring them in early saves no memory.
        is_direct: A gradient is ``parameter.grad``, and its slot's view may take its place at once:
            the hook that tells of it can bring it in.
        exchanges_data: Parameters have other data, of another dtype, while a step runs.
    """

    keeps_gradients: bool
    is_direct: bool
    exchanges_data: bool

    def gradient(self, slot: Slot) -> torch.Tensor | None:
        """Return the gradient as it is outside now."""

    def has_gradient(self, slot: Slot) -> bool:
        """Say whether there was a gradient when this slot was last collected, in this step."""

    def collect(self, slots: Sequence[Slot]) -> list[Slot]:
        """Copy gradients into their views, unscaled; return the slots that are not settled."""

    def collect_scaled(self, slot: Slot, factor: float) -> bool:
        """Copy one gradient into its view times ``factor``; say whether the slot is settled."""

    def settle(self, slots: Sequence[Slot]) -> None:
        """Let the outside show the views of these slots."""

    def settle_sparse(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Let the outside show a reduced sparse gradient."""


class LocalHome:
    """Gradients in ``parameter.grad``."""

    keeps_gradients = False
    exchanges_data = False

    def __init__(self, views: GradientViews) -> None:
        self._gives_views = self.is_direct = views is not GradientViews.NEVER

    def gradient(self, slot: Slot) -> torch.Tensor | None:
        """Return ``parameter.grad``."""
        return slot.parameter.grad

    def has_gradient(self, slot: Slot) -> bool:
        """A slot without a gradient is not given one before it is settled."""
        return slot.parameter.grad is not None

    def collect(self, slots: Sequence[Slot]) -> list[Slot]:
        """Copy what is not in its view yet; give out views where that is allowed."""
        empty: list[Slot] = []
        moved: list[Slot] = []
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for slot in slots:
            view, gradient = slot.view, slot.parameter.grad
            if gradient is None or view is None:
                empty.append(slot)
            elif gradient is not view:
                moved.append(slot)
                targets.append(view)
                sources.append(gradient)
        _copy_all(targets, sources)
        for slot in empty:
            slot.zero()
        if not self._gives_views or any(map(_requires_grad, sources)):
            return empty + moved
        kept: list[Slot] = []
        for slot, view in zip(moved, targets, strict=True):
            if slot.is_shared:
                kept.append(slot)
            else:
                slot.parameter.grad = view
        return empty + kept

    def collect_scaled(self, slot: Slot, factor: float) -> bool:
        """Copy and scale in one pass: large gradients are read and written once."""
        view, gradient = slot.view, slot.parameter.grad
        assert view is not None
        if gradient is None:
            view.zero_()
            return False
        if gradient is view:
            view.mul_(factor)
            return True
        scale_into(view, gradient, factor)
        if slot.is_shared or not self._may_become_view(gradient):
            return False
        slot.parameter.grad = view
        return True

    def settle(self, slots: Sequence[Slot]) -> None:
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
            elif self._may_become_view(gradient):
                slot.parameter.grad = view
            else:
                targets.append(gradient)
                sources.append(view)
        _copy_all(targets, sources)

    def settle_sparse(self, slot: Slot, gradient: torch.Tensor) -> None:
        """The reduced tensor becomes the gradient."""
        slot.parameter.grad = gradient

    def _may_become_view(self, gradient: torch.Tensor) -> bool:
        # A gradient with a graph (create_graph=True) stays the tensor that the graph knows.
        return self._gives_views and not gradient.requires_grad


class ContextHome:
    """Gradients in a distributed autograd context, which ``DistributedOptimizer`` reads.

    The context's tensors cannot be replaced, only written to. A parameter that this rank did not
    use has one because it was attached to the output (attach.py).

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

    def collect(self, slots: Sequence[Slot]) -> list[Slot]:
        """Copy from the context; nothing is ever settled before the reduction."""
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
        _copy_all(targets, sources)
        return list(slots)

    def collect_scaled(self, slot: Slot, factor: float) -> bool:
        """Copy one gradient from the context and scale it, in one pass."""
        gradient = self.gradient(slot)
        assert slot.view is not None
        if gradient is None:
            slot.view.zero_()
        else:
            torch.mul(gradient, factor, out=slot.view)
        return False

    def settle(self, slots: Sequence[Slot]) -> None:
        """Write the results into the context's tensors."""
        found = [(self._known.get(slot.parameter), slot.view) for slot in slots]
        shown = [(own, view) for own, view in found if own is not None and view is not None]
        _copy_all([own for own, _ in shown], [view for _, view in shown])

    def settle_sparse(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Write a sparse result into the context's tensor."""
        own = self._known.get(slot.parameter)
        if own is not None:
            own.copy_(gradient)


_requires_grad = attrgetter("requires_grad")


def _copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if len(targets) == 1:
        targets[0].copy_(sources[0])
    elif targets:
        torch._foreach_copy_(targets, sources)
