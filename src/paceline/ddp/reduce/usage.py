"""Which parameters received a gradient since the last reduction.

Gradients that arrive under ``no_sync`` count: they are part of what the next reduction averages.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.buckets import Slot
from paceline.ddp.reduce.gradient_access import GradientAccess


class UsageMap:
    """One flag per parameter, and whether the flags have been the same in every step."""

    def __init__(self, parameters: int) -> None:
        self.flags = bytearray(parameters)
        self.is_static = True
        self._previous: bytes | None = None

    def note(self, access: GradientAccess, slots: Iterable[Slot]) -> None:
        """Mark the slots that had a gradient: autograd may also arrive empty-handed."""
        for slot in slots:
            if access.has_gradient(slot):
                self.flags[slot.index] = 1

    def close_step(self) -> None:
        """Forget the flags, but not whether they differ from the step before."""
        current = bytes(self.flags)
        self.is_static &= self._previous in (None, current)
        self._previous = current
        self.flags = bytearray(len(self.flags))
