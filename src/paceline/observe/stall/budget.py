"""How long a rank may wait for others before that is a stall: learned from the waits that ended.

Pure: stamps come from the watchdog.

[Note: no false alarm]
Nobody is stalled as long as nobody waits: a validation, a checkpoint or a compilation that all
ranks go through together is no stall, however long. A rank that waits is patient by what the rank
does that it waits for. Inside of a step there is little that takes long, except the first time:
modules are compiled, memory is first touched. Between two steps, one rank may well evaluate or
save alone. A wait that was long, and ended, is expected again: nothing is said before it takes
twice as long.
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


@dataclass
class Budget:
    """The waits of one rank.

    Attributes:
        fixed_s: What the user asked for (``--stall-after``); None: learned.
    """

    fixed_s: float | None = None
    _waits_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _longest_s: float = 0.0

    def learn(self, wait_s: float) -> None:
        """A wait has ended, after which training went on."""
        self._waits_s.append(wait_s)
        self._longest_s = max(self._longest_s, wait_s)

    def limit_s(self, kind: WaitKind) -> float:
        """How long a wait may be."""
        if self.fixed_s is not None:
            return self.fixed_s
        usual_s = _FACTOR * _percentile(self._waits_s)
        return max(kind.value, usual_s, 2 * self._longest_s)

    @property
    def shortest_s(self) -> float:
        """No wait that is shorter is ever a stall."""
        return self.limit_s(WaitKind.IN_STEP)


def ended_wait_s(last: Status, now: Status) -> float | None:
    """How long the wait was that has ended between two looks, as the rank recorded it; or None."""
    is_over = (now.step, now.activity) != (last.step, last.activity)
    if not is_over or last.activity is not Activity.WAITING or now.activity is Activity.ENDED:
        return None
    return (now.since_ns - last.since_ns) / 1e9


def _percentile(values: deque[float]) -> float:
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(_PERCENTILE * len(ordered)))]
