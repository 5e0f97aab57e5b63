"""The hosts of an elastic job, and how many ranks each of them has room for. Pure.

Used by :mod:`paceline.elastic.membership`, which asks where a process is to be started.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Host:
    """One host: its number, the ranks that its launcher was asked for, whether it is there."""

    number: int
    ranks: int
    is_up: bool = True


@dataclass
class HostTable:
    """Which hosts there are.

    Attributes:
        known: By number; also those that are gone and may come back.
    """

    known: dict[int, Host] = field(default_factory=dict)

    def put(self, number: int, ranks: int) -> None:
        """A host is there, for the first time or again."""
        self.known[number] = Host(number, ranks)

    def is_up(self, number: int) -> bool:
        """Whether it is there."""
        return number in self.known and self.known[number].is_up

    def up(self) -> list[Host]:
        """Those that are there, in the order of their numbers."""
        return sorted((h for h in self.known.values() if h.is_up), key=lambda h: h.number)

    def ranks(self) -> int:
        """How many ranks their launchers were asked for, those of absent hosts included."""
        return sum(host.ranks for host in self.known.values())

    def target(self, wanted: int) -> int:
        """How many of the wanted ranks there is room for at present."""
        return min(wanted, sum(self._room(host, wanted) for host in self.up()))

    def pick(self, wanted: int, taken: Iterable[int], prefer: int | None) -> int | None:
        """Where to start one more rank; None if no host has room.

        Args:
            wanted: Ranks in all.
            taken: The host of each rank that there is.
            prefer: This one if it has room.
        """
        used = list(taken)
        free = {h.number: self._room(h, wanted) - used.count(h.number) for h in self.up()}
        if prefer is not None and free.get(prefer, 0) > 0:
            return prefer
        best = max(free, key=lambda number: free[number], default=None)
        return best if best is not None and free[best] > 0 else None

    def emptiest(self, taken: Iterable[int]) -> int | None:
        """The host with the fewest processes, for a spare; None if there is none."""
        used = list(taken)
        hosts = self.up()
        return min(hosts, key=lambda h: used.count(h.number)).number if hosts else None

    def _room(self, host: Host, wanted: int) -> int:
        """As many as were asked for there; if more are wanted in all, its share of those."""
        return max(host.ranks, math.ceil(wanted * host.ranks / max(1, self.ranks())))
