"""Which gradients have arrived in this step; in which order they do, and in a static graph how
often.

Order and counts are learnt from the first good step. What is learnt here decides about collectives,
so it is taken as known only when all ranks know alike that the step was good.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.buckets import Slot
from paceline.ddp.reduce.gradient_access import GradientAccess

UNKNOWN_ARRIVALS = 1 << 30
"""Expected arrivals while a static graph is being learnt: more than ever come."""


class Arrivals:
    """The arrivals of a step, by the parameters' indices, and what is learnt from them.

    Attributes:
        arrived: How often a parameter's gradient has arrived in this backward.
        expected: How often it will; more than once only in a static graph.
        log: Parameter indices as their gradients arrive; None once the order has been used.
        counts: How often each parameter's gradient arrives in one backward; None while not known,
            and always without ``static_graph``.
    """

    def __init__(self, parameters: int) -> None:
        self._parameters = parameters
        self.arrived = [0] * parameters
        self.expected = [1] * parameters
        self.log: list[int] | None = []
        self.counts: list[int] | None = None
        self.is_order_known = False

    def open_step(self, *, static_graph: bool) -> None:
        """Expect all gradients; forget what a step brought that did not turn out good."""
        self.arrived = [0] * self._parameters
        if self.counts is not None:
            self.expected = list(self.counts)
        else:
            self.expected = [UNKNOWN_ARRIVALS if static_graph else 1] * self._parameters
        if self.log is not None:
            self.log.clear()

    def count(self, indices: Sequence[int]) -> tuple[list[int], list[int]]:
        """Gradients have arrived: return whose are complete now, and whose have come too often."""
        if self.log is not None:
            self.log += indices
        arrived, expected = self.arrived, self.expected
        complete, unexpected = [], []
        for index in indices:
            times = arrived[index] = arrived[index] + 1
            if times == expected[index]:
                complete.append(index)
            elif times > expected[index]:
                unexpected.append(index)
        return complete, unexpected

    @property
    def may_repeat(self) -> bool:
        """Whether a gradient may come more than once in this step."""
        return max(self.expected, default=0) > 1

    def missing(self) -> list[int]:
        """Return whose gradients are still to come."""
        if self.arrived == self.expected:
            return []
        pairs = enumerate(zip(self.arrived, self.expected, strict=True))
        return [index for index, (arrived, expected) in pairs if arrived < expected]

    def learn(self, *, static_graph: bool = False) -> None:
        """A step was good on every rank; a rank that has joined learns no counts from it."""
        self.is_order_known = self.log is not None
        if static_graph and self.counts is None:
            self.counts = self.arrived

    def take_order(self) -> list[int]:
        """All parameters: by when their last gradient arrived, then those that had none."""
        seen = list(dict.fromkeys(reversed(self.log or ())))[::-1]
        missing = set(range(self._parameters)).difference(seen)
        self.log, self.is_order_known = None, False
        return [*seen, *sorted(missing, reverse=True)]

    def forget(self) -> None:
        """Start over."""
        self.log, self.counts, self.is_order_known = [], None, False


class UsageMap:
    """Which parameters received a gradient since the last reduction: one flag for each.

    Gradients that arrive under ``no_sync`` count: they are part of what the next reduction
    averages. ``is_static`` says whether the flags have been the same in every step.
    """

    def __init__(self, parameters: int) -> None:
        self.flags = bytearray(parameters)
        self.is_static = True
        self._previous: bytes | None = None

    def note(self, access: GradientAccess, slots: Iterable[Slot]) -> None:
        """Mark the slots that had a gradient: autograd may also arrive empty-handed."""
        for slot in slots:
            if access.has_gradient(slot):
                self.flags[slot.index] = 1

    def forget(self) -> None:
        """Gradients that have arrived belong to no step any more."""
        self.flags = bytearray(len(self.flags))

    def close_step(self) -> None:
        """Forget the flags, but not whether they differ from the step before."""
        current = bytes(self.flags)
        self.is_static &= self._previous in (None, current)
        self._previous = current
        self.flags = bytearray(len(self.flags))
