"""What is known about the step under way: made when a backward begins, dropped at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paceline.buckets import Slot
from paceline.ddp.agree.reports import FailureKind, FailureReport
from paceline.ddp.reduce.gradient_access import GradientHome


@dataclass
class Step:
    """The state of one step.

    Attributes:
        number: Counts from 0 in this group, failed and skipped steps included. Ranks compare it.
        rank: This rank, for reports.
        home: Where this step's gradients live.
        weight: This rank's ``weighted(n)``, if any.
        factor: What gradients are multiplied with on their way into the buckets.
        is_brought_in: Hooks bring gradients into plain buckets as they come, scaled
            ([Note: warm gradients] in taps.py).
        joined: This rank has left the loop and only keeps its peers company.
        absent: Slots to which this backward brings no gradient.
        unsettled: Slots whose results must still be shown outside.
        stash: Old gradients of absent parameters, in case no rank used them.
        failure: The first thing that went wrong here.
        shared: Slots that another step has too, by index ([Note: shared parameters] in sharing.py).
        left: Those of them that another step will show, which ends later.
        zeroed: Those of them that are zero, because another step was left out.
        drift: What this rank did since its last synchronised backward, as ranks compare it
            (:mod:`paceline.ddp.agree.drift`).
        is_cut_off: A hook failed before it started a collective, so this rank can no longer know
            which collective its peers are in: it must not start any.
    """

    number: int
    rank: int
    home: GradientHome
    weight: float | None
    factor: float
    joined: bool = False
    is_brought_in: bool = False
    absent: list[Slot] = field(default_factory=list)
    unsettled: list[Slot] = field(default_factory=list)
    stash: dict[int, torch.Tensor] = field(default_factory=dict)
    shared: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    zeroed: set[int] = field(default_factory=set)
    failure: FailureReport | None = None
    drift: int = 0
    is_cut_off: bool = False

    def fail(self, kind: FailureKind, slots: Sequence[Slot], detail: str = "") -> None:
        """Note a failure. The first one is told; but what is not finite may be left out."""
        if self.failure is None or self.failure.kind is FailureKind.NONFINITE:
            names = tuple(slot.spec.name for slot in slots)
            indices = tuple(slot.index for slot in slots)
            self.failure = FailureReport(kind, self.rank, names, indices, detail)

    def fail_to_copy(self, slots: Sequence[Slot], error: BaseException) -> None:
        """Note that gradients do not fit their buckets; say so if a parameter was converted."""
        changed = converted(slots)
        detail = conversion(changed[0]) if changed else str(error)
        self.fail(FailureKind.GRADIENT_MISMATCH, changed or slots, detail)


def converted(slots: Sequence[Slot]) -> list[Slot]:
    """Return the slots whose parameters have another dtype than when they were planned."""
    return [slot for slot in slots if slot.parameter.dtype != slot.spec.dtype]


def conversion(slot: Slot) -> str:
    """Say how a parameter was converted."""
    return f"was {slot.spec.dtype} when the module was wrapped, is {slot.parameter.dtype} now"
