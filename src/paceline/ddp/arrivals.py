"""In which order gradients arrive, and in a static graph how often: learnt from the first good
step.

What is learnt here decides about collectives, so it is taken as known only when all ranks know
alike that the step was good.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.buckets import Slot


class Arrivals:
    """The order of arrival, until buckets have been cut by it; and the counts of a static graph.

    Attributes:
        log: Parameter indices as their gradients arrive; None once the order has been used.
        counts: How often each parameter's gradient arrives in one backward; None while not known,
            and always without ``static_graph``.
    """

    def __init__(self, parameters: int) -> None:
        self._parameters = parameters
        self.log: list[int] | None = []
        self.counts: list[int] | None = None
        self.is_order_known = False

    def open_step(self) -> None:
        """Forget what a step brought that did not turn out good."""
        if self.log is not None:
            self.log.clear()

    def learn(self, slots: Sequence[Slot] = (), *, static_graph: bool = False) -> None:
        """A step was good on every rank; a rank that has joined has no slots to learn from."""
        self.is_order_known = self.log is not None
        if static_graph and self.counts is None and slots:
            self.counts = [slot.arrived for slot in slots]

    def take_order(self) -> list[int]:
        """All parameters: by when their last gradient arrived, then those that had none."""
        seen = list(dict.fromkeys(reversed(self.log or ())))[::-1]
        missing = set(range(self._parameters)).difference(seen)
        self.log, self.is_order_known = None, False
        return [*seen, *sorted(missing, reverse=True)]

    def forget(self) -> None:
        """Start over."""
        self.log, self.counts, self.is_order_known = [], None, False
