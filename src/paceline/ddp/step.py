"""What is known about the step under way: made when a backward begins, dropped at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paceline.buckets import Slot
from paceline.ddp.diagnosis import FailureKind, FailureReport
from paceline.ddp.homes import GradientHome


@dataclass
class Step:
    """The state of one step.

    Attributes:
        number: Counts from 0, failed and skipped steps included. Ranks compare it.
        rank: This rank, for reports.
        home: Where this step's gradients live.
        weight: This rank's ``weighted(n)``, if any.
        factor: What gradients are multiplied with on their way into the buckets.
        joined: This rank has left the loop and only keeps its peers company.
        absent: Slots to which this backward brings no gradient.
        unsettled: Slots whose results must still be shown outside.
        stash: Old gradients of absent parameters, in case no rank used them.
        failure: The first thing that went wrong here.
    """

    number: int
    rank: int
    home: GradientHome
    weight: float | None
    factor: float
    joined: bool = False
    absent: list[Slot] = field(default_factory=list)
    unsettled: list[Slot] = field(default_factory=list)
    stash: dict[int, torch.Tensor] = field(default_factory=dict)
    failure: FailureReport | None = None

    def fail(self, kind: FailureKind, slots: Sequence[Slot], detail: str = "") -> None:
        """Note a failure; the first one is the one that is told."""
        if self.failure is None:
            names = tuple(slot.spec.name for slot in slots)
            indices = tuple(slot.index for slot in slots)
            self.failure = FailureReport(kind, self.rank, names, indices, detail)
