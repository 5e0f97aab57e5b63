"""How long a rank may wait for others before that is a stall: learned from the waits that ended.

Pure: stamps come from the watchdog.

[Note: no false alarm]
A rank that waits is patient by what the rank does that it waits for. Inside of a step there is
little that takes long, except the first time: modules are compiled, memory is first touched.
Between two steps, one rank may well evaluate or save alone. Where no rank waits, ranks may go
through a validation, a checkpoint or a compilation together, or all be stuck: only when none of
them has begun anything else for a long time, that is said. What was long, and ended, is expected
again: nothing is said before it takes twice as long.

A budget that the user has set is taken at its word: whatever takes longer is reported.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

from paceline.observe.records import Activity, Status

FIRST_STEPS = 3
_KEPT = 500
_FACTOR = 20.0
_PERCENTILE = 0.99


class WaitKind(enum.Enum):
    """What the other rank does; the value is how many seconds of waiting are always allowed."""

    IN_STEP = 15.0
    """Forward, backward or optimizer; or it is dead, or stopped."""

    BETWEEN_STEPS = 60.0
    """Data loader, evaluation, checkpoint."""

    FIRST_TIME = 300.0
    """One of the first steps, or a compilation."""

    NOBODY_WAITS = 600.0
    """All ranks are at work, and none begins anything else."""


@dataclass
class Budget:
    """The waits of one rank.

    Attributes:
        fixed_s: What the user asked for (``--stall-after``); None: learned.
    """

    fixed_s: float | None = None
    _waits_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _usual_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _longest_s: float = 0.0
    _longest_work_s: float = 0.0

    def learn(self, wait_s: float, *, is_usual: bool = True) -> None:
        """A wait has ended, after which training went on; not usual are those of first steps."""
        self._waits_s.append(wait_s)
        self._longest_s = max(self._longest_s, wait_s)
        if is_usual:
            self._usual_s.append(wait_s)

    def learn_work(self, took_s: float) -> None:
        """Something else has ended: input, a forward, a backward, an optimizer's step."""
        self._longest_work_s = max(self._longest_work_s, took_s)

    def limit_s(self, kind: WaitKind) -> float:
        """How long a wait may be."""
        if self.fixed_s is not None:
            return self.fixed_s
        if kind is WaitKind.NOBODY_WAITS:
            return max(float(kind.value), 2 * self._longest_work_s)
        usual_s = _FACTOR * _quantile(self._waits_s, _PERCENTILE)
        return max(float(kind.value), usual_s, 2 * self._longest_s)

    @property
    def usual_wait_s(self) -> float:
        """How long a wait takes that was seen; 0 if none was, after the first steps."""
        return _quantile(self._usual_s, 0.5)

    @property
    def shortest_s(self) -> float:
        """No wait that is shorter is ever a stall."""
        return self.limit_s(WaitKind.IN_STEP)


def ended_s(last: Status, now: Status) -> float | None:
    """How long it took what a rank did at the last look and does no more; None: it goes on.

    Nothing is learned from what the process ended in, nor before it recorded anything.
    """
    is_over = now.since_ns != last.since_ns and last.since_ns > 0
    if not is_over or Activity.ENDED in (last.activity, now.activity):
        return None
    return (now.since_ns - last.since_ns) / 1e9


def _quantile(values: deque[float], share: float) -> float:
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
