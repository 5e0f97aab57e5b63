"""Counts what may lead ranks apart without anybody noticing: forwards, local gradients, updates.

Kept by a step runner; the reducer tells it about forwards and about the beginning of backward
passes; optimizers tell it about updates (:mod:`paceline.ddp.autograd.optimizer_steps`). Ranks
compare their counts in the control block (:mod:`paceline.ddp.agree.out_of_step`); what all ranks do
alike is looked at here. ``docs/drift.md`` says what becomes of each sign.

[Note: what is counted] Between two synchronised backward passes of this rank:

    steps      stretches from one backward to the next in which an optimizer stepped. Stretches, not
               calls: who steps twice, or exchanges weights for an evaluation, still counts once
    updates    the same, or a parameter's version changed: that sees a loop without an optimizer and
               a step that torch.compile has taken in
    unsynced   updates with gradients that were never averaged: a backward under no_sync, or through
               ``ddp.module``, and then an update with no synchronised backward between
    raised     forwards that raised
    left_out   those of them whose inputs were not run again

Ranks that do the same have the same numbers. What was stepped before the first synchronised
backward is not compared: some checkpoint libraries step an optimizer once, on one rank, to give it
a state.

[Note: others' gradients] Wrappers may share layers. A gradient that belongs to the synchronised
backward of another wrapper is local for this one, and yet averaged: it is not counted here.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from paceline.containers import tensors_in
from paceline.ddp.agree.no_sync_guard import NoSyncGuard
from paceline.ddp.autograd.optimizer_steps import observe_optimizers, observe_updates
from paceline.torch_private.autograd import backward_id
from paceline.torch_private.groups import collectives_of_all_groups

LOCAL_UPDATES = 16
"""So many updates in a row under no_sync, with no collective of the user's between them, may be
local SGD before its first average."""

BYPASSED_UPDATES = 1
"""So many through ``ddp.module`` may be a probe."""


_synced_backward = -2
"""The number of the backward in which a wrapper of this process last began a synchronised step."""


class Tally(NamedTuple):
    """What a rank did since its last synchronised backward."""

    forwards: int = 0
    raised: int = 0
    left_out: int = 0
    local: int = 0
    bypassed: int = 0
    steps: int = 0
    updates: int = 0
    unsynced: int = 0

    def code(self) -> int:
        """Return what ranks compare, in four bytes; more than 255 is 255."""
        left_out = 1 + self.left_out if self.raised else 0
        compared = self.steps, self.updates, self.unsynced, left_out
        return int.from_bytes(bytes(min(count, 255) for count in compared), "little")


class Drift:
    """One wrapper's counts.

    Attributes:
        parameters: What the wrapper reduces. The first one's version stands for all.
        forwards: Since the last synchronised backward; the reducer counts them.
        abandoned: The first rows of the inputs of a forward that raised, if it was the latest.
        no_sync: Which local backward passes ran outside of no_sync.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = parameters
        self.no_sync = NoSyncGuard(parameters)
        self._observes_begins = False
        self._last: tuple[int, ...] = Tally()
        self._has_warned = False
        self._is_stepped_by_optimizers = False
        self._backward_id = -1
        self._row = self._collectives = 0
        self._is_row_local = False
        self.forget()
        observe_updates(self)

    @property
    def last(self) -> Tally:
        """What this rank did before its latest synchronised backward."""
        return Tally(*self._last)

    def forget(self) -> None:
        """Begin anew, for example with another group."""
        self._has_synced = False
        self._is_synced = False
        self._is_stepped = False
        self._version = self.parameters[0]._version
        self._clear()
        self._is_all_synced = False

    def _clear(self) -> None:
        self._is_all_synced = True
        self.no_sync.clear()
        self.forwards = self._local_forwards = 0
        self._local = self._bypassed = self._pending = 0
        self._steps = self._updates = self._unsynced = self._raised = self._left_out = 0
        self.abandoned: list[torch.Tensor] = []

    # --- forward -------------------------------------------------------------------------------

    def on_local_forward(self) -> None:
        """A forward under no_sync has run."""
        self._is_all_synced = False
        self.forwards += 1
        self._local_forwards += 1

    def abandon(self, inputs: Any) -> None:
        """A forward raised."""
        self._is_all_synced = False
        self._raised += 1
        self._left_out += 1
        self.abandoned = _first_rows(inputs)

    def begin_again(self, inputs: Any) -> None:
        """A forward begins after one that raised: with the same inputs, or a part, all is well."""
        before, self.abandoned = self.abandoned, []
        if any(map(_is_same, before, _first_rows(inputs))):
            self._left_out -= 1

    # --- backward and updates ------------------------------------------------------------------

    def on_optimizer_begin(self) -> None:
        """An optimizer is about to step."""
        if self._pending:
            self.no_sync.check()

    def on_optimizer_step(self) -> None:
        """An optimizer has stepped."""
        if self._pending:
            self.no_sync.check()  # its closure ran the backward
        self._is_stepped = self._is_stepped_by_optimizers = True
        if self._pending and any(p.grad is not None for p in self.parameters):
            self._note_unsynced()
        self._is_synced = False

    def on_local_gradient(self) -> None:
        """A gradient has arrived that is not reduced: count the backward that it belongs to."""
        number = backward_id()
        if number in (self._backward_id, _synced_backward):
            return  # known; or averaged by another wrapper ([Note: others' gradients])
        self._backward_id = number
        self._is_all_synced = False
        self._end_stretch()
        if not self._is_stepped_by_optimizers:
            self._values = self._some_values()
        self._pending += 1
        if self._local_forwards:
            self._local += 1
            if self.no_sync.note_backward() and not self._observes_begins:
                self._observes_begins = True
                observe_optimizers(self)
        else:
            self._bypassed += 1

    def take(self) -> int:
        """A synchronised backward begins: return what ranks compare, and count anew."""
        global _synced_backward
        _synced_backward = backward_id()
        if not self._is_all_synced:
            return self._take_all()
        version = self.parameters[0]._version
        steps = 1 if self._is_stepped else 0
        updates = 1 if steps or version != self._version else 0
        self._last = (self.forwards, 0, 0, 0, 0, steps, updates, 0)
        self.forwards = 0
        self._is_stepped, self._is_synced, self._version = False, True, version
        return steps | updates << 8

    def _take_all(self) -> int:
        """The same after the first steps, local gradients, or forwards that raised."""
        self._end_stretch()
        if not self._has_synced:
            self._has_synced = True
            self._steps = self._updates = 0
        self._last = tally = Tally(
            self.forwards,
            self._raised,
            self._left_out,
            self._local,
            self._bypassed,
            self._steps,
            self._updates,
            self._unsynced,
        )
        self._clear()
        self._is_synced = True
        return tally.code()

    def _end_stretch(self) -> None:
        """A backward begins: what was done since the one before?"""
        version = self.parameters[0]._version
        if self._is_stepped:
            self._steps += 1
            self._updates += 1
        elif version != self._version:
            self._updates += 1
            if not self._is_stepped_by_optimizers:
                self._end_stretch_by_hand()
        self._is_stepped = False
        self._version = version

    def _end_stretch_by_hand(self) -> None:
        """A parameter was written to, and no optimizer was ever seen."""
        if self._pending and not torch.equal(self._values, self._some_values()):
            self._note_unsynced()
        self._is_synced = False

    def _some_values(self) -> torch.Tensor:
        """What a loop without an optimizer changes; who exchanges weights brings them back."""
        with torch.no_grad():
            return self.parameters[0].reshape(-1)[:64].clone()

    # --- what all ranks do alike ---------------------------------------------------------------

    def on_sync_end(self) -> None:
        """A synchronised backward has ended; its own collectives are no sign of the user's."""
        if self._row:
            if not self._is_row_local:
                self._row = 0  # an inner loop of meta-learning, perhaps
            self._collectives = collectives_of_all_groups()

    def _note_unsynced(self) -> None:
        """Gradients that were never averaged have changed the parameters."""
        self._unsynced += 1
        self._pending = 0
        self.no_sync.clear()
        if self._is_synced and not self._local_forwards:
            return  # beside averaged ones: may be the same on all ranks, as those of a penalty
        collectives = collectives_of_all_groups()
        self._row = self._row + 1 if collectives == self._collectives else 1
        self._collectives = collectives
        self._is_row_local = bool(self._local_forwards)
        limit = LOCAL_UPDATES if self._is_row_local else BYPASSED_UPDATES
        if self._row > limit and not self._has_warned:
            self._has_warned = True
            self._warn()

    def _warn(self) -> None:
        how = (
            "Their forwards ran inside `with ddp.no_sync():`; leave it for the last one before "
            "optimizer.step()."
            if self._is_row_local
            else "Their forwards did not run through the wrapper: call model(x) where model is the "
            "DistributedDataParallel, not model.module(x)."
        )
        warnings.warn(
            f"{self._row} times in a row the parameters were updated with gradients that were "
            f"never averaged over the ranks, so every rank trains a model of its own. {how} If you "
            "average gradients or parameters in another way, ignore this; it is said once.",
            stacklevel=_USERS_FRAME,
        )


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)


def _first_rows(inputs: Any) -> list[torch.Tensor]:
    """Copy as much of inputs as tells whether others are the same, or begin with the same row."""
    rows = []
    with torch.no_grad():
        for tensor in tensors_in(inputs):
            if tensor.layout is torch.strided and tensor.numel():
                while tensor.dim() > 1:
                    tensor = tensor[0]
                rows.append(tensor.reshape(-1)[:64].clone())
    return rows


_USERS_FRAME = 6
"""From the warning up to the line with ``optimizer.step()``."""
