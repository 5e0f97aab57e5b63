"""What is known about the step under way: made when a backward begins, dropped at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paceline.buckets import Slot
from paceline.ddp.agree.reports import FailureKind, FailureReport
from paceline.ddp.reduce.gradient_access import GradientAccess


@dataclass
class Step:
    """The state of one step.

    Attributes:
        number: Counts from 0 in this group, failed and skipped steps included. Ranks compare it.
        rank: This rank, for reports.
        access: Where this step's gradients live.
        weight: This rank's ``weighted(n)``, if any.
        factor: What gradients are multiplied with on their way into the buckets
            ([Note: scaling] in gradient_access.py).
        hooks_copy: Hooks copy gradients in as they come ([Note: warm gradients] in hooks.py).
        joined: This rank has left the loop and only takes part in what its peers still do.
        absent: Slots to which this backward brings no gradient.
        unpublished: Slots whose results must still be shown outside.
        stash: Old gradients of absent parameters, in case no rank used them.
        failure: The first thing that went wrong here.
        shared: Slots that another step has too, by index ([Note: shared parameters] in sharing.py).
        left: Those of them that another step will show, which ends later.
        zeroed: Those of them that are zero, because another step was left out.
        drift: What this rank did since its last synchronised backward, as ranks compare it
            (:mod:`paceline.ddp.agree.drift`).
        digest: Of the parameters, in a step that compares them
            (:mod:`paceline.ddp.agree.replicas`).
        is_cut_off: A hook failed before it started a collective, so this rank can no longer know
            which collective its peers are in: it must not start any.
    """

    number: int
    rank: int
    access: GradientAccess
    weight: float | None
    factor: float
    joined: bool = False
    hooks_copy: bool = False
    absent: list[Slot] = field(default_factory=list)
    unpublished: list[Slot] = field(default_factory=list)
    stash: dict[int, torch.Tensor] = field(default_factory=dict)
    shared: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    zeroed: set[int] = field(default_factory=set)
    failure: FailureReport | None = None
    drift: int = 0
    digest: int = 0
    is_cut_off: bool = False

    def fail(self, kind: FailureKind, slots: Sequence[Slot], detail: str = "") -> None:
        """Note a failure. The first one is told; but what is not finite may be left out."""
        if self.failure is None or self.failure.kind is FailureKind.NONFINITE:
            self.failure = report_failure(kind, self.rank, slots, detail)

    def fail_to_copy(self, slots: Sequence[Slot], error: BaseException) -> None:
        """Note that gradients do not fit their buckets; say so if a parameter was converted."""
        changed = _converted(slots)
        detail = _conversion(changed[0]) if changed else str(error)
        self.fail(FailureKind.GRADIENT_MISMATCH, changed or slots, detail)

    def fail_missing(self, slots: Sequence[Slot], *, may_be_converted: bool) -> None:
        """Note which gradients never came, and if that is because a parameter was converted."""
        changed = _converted(slots) if may_be_converted else []
        if changed:
            self.fail(FailureKind.GRADIENT_MISMATCH, changed, _conversion(changed[0]))
        frozen = [slot.spec.name for slot in slots if not slot.parameter.requires_grad]
        detail = f"requires_grad is False there: {', '.join(frozen)}" if frozen else ""
        self.fail(FailureKind.MISSING, slots, detail)

    def fail_unexpected(self, slot: Slot, arrived: int, expected: int, *, is_static: bool) -> None:
        """Note that a gradient came too often."""
        kind = FailureKind.GRAPH_CHANGED if is_static else FailureKind.READY_TWICE
        detail = f"gradient number {arrived} in this backward, expected {expected}"
        self.fail(kind, [slot], detail)


def report_failure(
    kind: FailureKind, rank: int, slots: Sequence[Slot], detail: str = ""
) -> FailureReport:
    """Return a report that names the parameters of these slots."""
    names = tuple(slot.spec.name for slot in slots)
    return FailureReport(kind, rank, names, tuple(slot.index for slot in slots), detail)


def _converted(slots: Sequence[Slot]) -> list[Slot]:
    """Return the slots whose parameters have another dtype than when they were planned."""
    return [slot for slot in slots if slot.parameter.dtype != slot.spec.dtype]


def _conversion(slot: Slot) -> str:
    """Say how a parameter was converted."""
    return f"was {slot.spec.dtype} when the module was wrapped, is {slot.parameter.dtype} now"
