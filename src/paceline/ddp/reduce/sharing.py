"""Parameters that several wrappers reduce, while steps of theirs run in one backward.

[Note: shared parameters]
In ``(loss(a(x)) + loss(b(x))).backward()``, where ``a`` and ``b`` share layers, a shared
parameter's gradient is the sum of both, and both reducers are told of it. Each copies it into its
own bucket; either result is the mean. Two things would make it wrong, so in such a step

    no hook copies a shared gradient in, and none becomes a view of a bucket: who reads it later
    would find it scaled, or half reduced;
    only the step that ends last shows its result, for the same reason.

A wrapper that runs alone treats all of its parameters alike, whoever else may hold them. So steps
meet when the second of them begins: before any gradient that both wait for, because that hangs on
the outputs of both.

What steps do not have in common (weights, groups, precision) cannot be made right here, because the
parts of the gradient cannot be told apart any more. Such steps fail, both, on every rank.

Called by :mod:`paceline.ddp.reduce.step_runner` and :mod:`paceline.ddp.features.delayed`. A step is
found to run by its callback at the end of the backward, which goes with the backward, also if that
raised.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from paceline.buckets import Slot
from paceline.config import NonFinite
from paceline.ddp.agree.reports import FailureKind
from paceline.ddp.reduce.context import ReduceContext
from paceline.ddp.reduce.progress import StepProgress
from paceline.ddp.reduce.step import Step

Callback = Callable[[], None]


class Sharer(Protocol):
    """What a step runner shows to others that reduce some of the same parameters."""

    parameters: list[torch.Tensor]
    context: ReduceContext
    progress: StepProgress
    sharing: Sharing

    @property
    def step_in_flight(self) -> Step | None:
        """The step whose backward is running, if any."""

    @property
    def held_step(self) -> Step | None:
        """The step that ``finalize_backward()`` will end, if any."""


@dataclass(frozen=True)
class _Other:
    """Another reducer, and the parameters in common: our indices and theirs, pair by pair."""

    sharer: weakref.ref[Sharer]
    ours: tuple[int, ...]
    theirs: tuple[int, ...]


_everybody: weakref.WeakSet[Sharer] = weakref.WeakSet()


class Sharing:
    """Who else reduces some of a reducer's parameters."""

    def __init__(self, sharer: Sharer) -> None:
        self._sharer = weakref.ref(sharer)
        self._others: list[_Other] = []
        self._callback: weakref.ref[Callback] | None = None
        self.foreign: tuple[int, ...] = ()
        self._introduce(sharer)

    def _introduce(self, sharer: Sharer) -> None:
        mine = {id(parameter): index for index, parameter in enumerate(sharer.parameters)}
        for other in list(_everybody):
            theirs = [i for i, parameter in enumerate(other.parameters) if id(parameter) in mine]
            if theirs:
                ours = tuple(mine[id(other.parameters[index])] for index in theirs)
                self._others.append(_Other(weakref.ref(other), ours, tuple(theirs)))
                meeting = _Other(self._sharer, tuple(theirs), ours)
                other.sharing._others.append(meeting)
        _everybody.add(sharer)

    def share_with_foreign(self, indices: tuple[int, ...]) -> None:
        """torch's own wrapper reduces these parameters as well (features/foreign.py)."""
        self.foreign = indices

    def __bool__(self) -> bool:
        """Whether somebody else reduces parameters of ours; those that are gone are forgotten."""
        if self._others:
            self._others = [other for other in self._others if other.sharer() is not None]
        return bool(self._others or self.foreign)

    # --- whose backward runs -------------------------------------------------------------------

    def watch(self, finish: Callback) -> Callback:
        """Return what to queue for the end of a backward, so that others see when that is gone."""
        if not self:
            return finish
        callback: Callback = partial(finish)
        self._callback = weakref.ref(callback)
        return callback

    @property
    def is_backward_running(self) -> bool:
        """Whether the backward of the latest step runs, and will come to its end."""
        return self._callback is not None and self._callback() is not None

    def _running(self) -> Iterator[tuple[_Other, Sharer, Step]]:
        for other in self._others:
            sharer = other.sharer()
            step = sharer.step_in_flight if sharer is not None else None
            if sharer is not None and step is not None and sharer.sharing.is_backward_running:
                yield other, sharer, step

    def _unfinished(self) -> Iterator[tuple[_Other, Sharer, Step]]:
        """Those that run, and those that are over but held (manual_finish.py)."""
        yield from self._running()
        for other in self._others:
            sharer = other.sharer()
            if sharer is not None and sharer.held_step is not None:
                yield other, sharer, sharer.held_step

    def is_others_business(self, index: int) -> bool:
        """Whether a gradient arrives in a backward of somebody else's."""
        return any(index in other.ours for other, _, _ in self._running())

    # --- a step --------------------------------------------------------------------------------

    def meet(self, step: Step) -> None:
        """A step of ours begins: keep what it has in common with others in flight outside."""
        me = self._sharer()
        assert me is not None
        if self.foreign:
            me.progress.keep_apart(step, self.foreign)
            _refuse_weight(step, [me.progress.slots[index] for index in self.foreign])
        for other, sharer, theirs in self._running():
            me.progress.keep_apart(step, other.ours)
            sharer.progress.keep_apart(theirs, other.theirs)
            reason = _difference((me, step), (sharer, theirs))
            if reason:
                step.fail(FailureKind.SHARED, [me.progress.slots[i] for i in other.ours], reason)
                theirs.fail(
                    FailureKind.SHARED, [sharer.progress.slots[i] for i in other.theirs], reason
                )

    def leave_to_others(self, step: Step) -> None:
        """A step of ours ends: what others in flight have in common with it, they will show."""
        for other, _, theirs in self._unfinished():
            pairs = zip(other.ours, other.theirs, strict=True)
            step.left.update(mine for mine, index in pairs if index in theirs.shared)

    def skip(self) -> None:
        """A step of ours is left out: what the others will show of it is zero as well."""
        for other, _, theirs in self._unfinished():
            theirs.zeroed.update(other.theirs)


def _difference(one: tuple[Sharer, Step], two: tuple[Sharer, Step]) -> str:
    """Say in which way two steps treat a gradient differently; empty if they do not."""
    (mine, step), (other, theirs) = one, two
    if step.weight != theirs.weight:
        weights = " and ".join(_weight(s.weight) for s in (step, theirs))
        return f"one wrapper weighs this step differently than the other: {weights}"
    if step.access.exchanges_data or theirs.access.exchanges_data:
        return "one of the wrappers has mixed_precision, and exchanged the parameter's data"
    ranks, their_ranks = mine.context.peers.ranks, other.context.peers.ranks
    if ranks != their_ranks:
        return f"the wrappers average over ranks {ranks} and {their_ranks}"
    policies = {mine.context.policy.nonfinite, other.context.policy.nonfinite}
    if len(policies) > 1 and NonFinite.SKIP in policies:
        return 'one of the wrappers has nonfinite="skip", the other has not'
    is_averaged = step.weight is None and not mine.context.has_hook and not other.context.has_hook
    if is_averaged and step.factor != theirs.factor:
        return (
            f"one wrapper divides by {1 / step.factor:g} ranks, the other by {1 / theirs.factor:g}"
        )
    return ""


def _weight(weight: float | None) -> str:
    return "no weighted()" if weight is None else f"weighted({weight:g})"


def _refuse_weight(step: Step, slots: Sequence[Slot]) -> None:
    if step.weight is not None:
        step.fail(
            FailureKind.SHARED,
            slots,
            f"torch's DistributedDataParallel averages it without {_weight(step.weight)}",
        )


def fail_sharers(delayed: Sequence[torch.Tensor]) -> None:
    """Fail the steps in flight that reduce parameters whose gradients are averaged elsewhere now.

    For delayed parameters (delayed.py): they are divided and reduced in place, in their gradients.
    """
    ids = {id(parameter) for parameter in delayed}
    for sharer in list(_everybody):
        step = sharer.step_in_flight
        if step is None or not sharer.sharing.is_backward_running:
            continue
        shared = [slot for slot in sharer.progress.slots if id(slot.parameter) in ids]
        if shared:
            step.fail(FailureKind.SHARED, shared, "another wrapper delays its reduction")
