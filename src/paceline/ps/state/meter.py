"""How often and how long: counters and a window of recent calls, for ``paceline ps stats``.

Called by ``ps/state/store.py`` for each table's share of each message, so ``add`` is one append.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

WINDOW = 2048
"""So many recent calls are remembered."""
RECENT_S = 10.0
"""Rates are of this long, or of the time in which the window filled."""


class Meter:
    """Counts one kind of work on one table."""

    __slots__ = ("_recent", "calls", "ids")

    def __init__(self) -> None:
        self.calls = 0
        self.ids = 0
        self._recent: deque[tuple[int, int]] = deque(maxlen=WINDOW)

    def add(self, ids: int, start_ns: int, end_ns: int) -> None:
        """One call is done; times are of ``time.perf_counter_ns``."""
        self.calls += 1
        self.ids += ids
        self._recent.append((end_ns, end_ns - start_ns))

    def summary(self, name: str, plural: str) -> dict[str, Any]:
        """Calls and ids since the start; rate and quantiles of what is recent."""
        now_ns = time.perf_counter_ns()
        since_ns = now_ns - int(RECENT_S * 1e9)
        recent = [(end_ns, took_ns) for end_ns, took_ns in self._recent if end_ns >= since_ns]
        span_s = RECENT_S
        if recent and len(recent) == WINDOW:
            span_s = max(1e-9, (now_ns - recent[0][0]) / 1e9)
        took = sorted(took_ns for _, took_ns in recent)
        return {
            plural: self.calls,
            f"{name}_ids": self.ids,
            f"{plural}_per_s": round(len(recent) / span_s, 3),
            f"{name}_p50_us": _quantile_us(took, 0.50),
            f"{name}_p99_us": _quantile_us(took, 0.99),
        }


def _quantile_us(ordered_ns: list[int], share: float) -> float | None:
    if not ordered_ns:
        return None
    return round(ordered_ns[min(len(ordered_ns) - 1, int(share * len(ordered_ns)))] / 1e3, 1)
