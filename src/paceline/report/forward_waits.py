"""Waiting inside of forwards: buffers that rank 0 sends, SyncBatchNorm, collectives of the script.

Such a forward ends at the same time on all ranks, however late one of them began it. The time that
the others then spend in it is not their own; without this, a slow input would be blamed on nobody.
It is seen by its effect: when a certain rank begins last, do forwards that began apart end
together?

Called by steps.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.report.numbers import median

# Forwards count as ending together if their ends are so much closer than their begins.
TOGETHER = 0.3
# So many steps are needed to tell, and begins so far apart (as a share of the longest forward).
MIN_STEPS = 3
MIN_APART = 0.2


@dataclass(frozen=True)
class Forwards:
    """The forwards of one step, by rank."""

    began_ns: Mapping[int, int]
    ended_ns: Mapping[int, int]

    @property
    def last(self) -> int:
        """The rank that began last."""
        return max(self.began_ns, key=lambda rank: self.began_ns[rank])

    def took_ns(self, rank: int) -> int:
        """How long a rank was in it."""
        return self.ended_ns[rank] - self.began_ns[rank]

    def ratio(self) -> float | None:
        """How far apart ends are, by how far apart begins are; None if those are not."""
        apart = max(self.began_ns.values()) - min(self.began_ns.values())
        longest = max(self.took_ns(rank) for rank in self.began_ns)
        if len(self.began_ns) < 2 or apart <= MIN_APART * longest:
            return None
        return (max(self.ended_ns.values()) - min(self.ended_ns.values())) / apart


def awaited_ranks(steps: Sequence[Forwards]) -> frozenset[int]:
    """Return the ranks for which others wait in their forwards."""
    ratios: dict[int, list[float]] = {}
    for forwards in steps:
        ratio = forwards.ratio()
        if ratio is not None:
            ratios.setdefault(forwards.last, []).append(ratio)
    return frozenset(
        rank
        for rank, found in ratios.items()
        if len(found) >= MIN_STEPS and median(found) < TOGETHER
    )


def forward_waits(forwards: Forwards, awaited: frozenset[int]) -> dict[int, int]:
    """Return how long each rank waited in its forward for the one that began last."""
    last = forwards.last
    if last not in awaited:
        return dict.fromkeys(forwards.began_ns, 0)
    usual = forwards.took_ns(last)
    return {
        rank: max(0, min(forwards.began_ns[last] - began, forwards.took_ns(rank) - usual))
        for rank, began in forwards.began_ns.items()
    }
