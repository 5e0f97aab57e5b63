"""A reduction that whoever waits for it does.

Used by the transports, for what does not pay to begin earlier, and by the sums of logical shards.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns


class LateReduction:
    """Does its work inside of :meth:`wait`.

    Args:
        work: Brings the sum to the buffer, or raises a CollectiveError that names the rank. It is
            called once, and let go of.
    """

    __slots__ = ("_callback", "_work")

    def __init__(self, work: Callable[[], object]) -> None:
        self._work: Callable[[], object] | None = work
        self._callback: Callable[[int], None] | None = None

    def wait(self) -> None:
        """Do it, if nobody has."""
        work, self._work = self._work, None
        if work is None:
            return
        work()
        if self._callback is not None:
            self._callback(perf_counter_ns())

    def is_done(self) -> bool:
        """Not before somebody has waited."""
        return self._work is None

    def on_done(self, callback: Callable[[int], None]) -> None:
        """Tell inside of :meth:`wait`."""
        self._callback = callback
