"""A comparison: what contenders took for the same work, round by round, and who won.

Made by every subject; shown as a table, a plot and JSON by :mod:`~.report` and :mod:`~.plot`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from paceline.cli.bench.harness.estimates import Blocks, Estimate, estimate, ratio


@dataclass(frozen=True)
class Comparison:
    """One piece of work, done by several contenders in turn.

    Attributes:
        title: What was done, for example ``"mlp, 2 ranks"``.
        baseline: The contender that the others are compared with.
        times_ms: By contender, round and step. Rounds with the same number belong together.
        aside: Contenders that are shown and cannot win: they do not do the whole work.
    """

    title: str
    baseline: str
    times_ms: Mapping[str, Blocks]
    aside: tuple[str, ...] = ()

    def time_ms(self, contender: str) -> Estimate:
        """Return the median time, with its interval over rounds."""
        return estimate([median(block) for block in self.times_ms[contender]])

    def speed(self, contender: str, over: str | None = None) -> Estimate:
        """Return how many times as fast as the baseline (or another one) a contender is."""
        return ratio(self.times_ms[over or self.baseline], self.times_ms[contender])

    @property
    def winners(self) -> list[str]:
        """The fastest; and those that cannot be told from it, because the interval holds 1."""
        racing = [name for name in self.times_ms if name not in self.aside]
        best = min(racing, key=lambda name: self.time_ms(name).value)
        return [n for n in racing if n == best or self.speed(n, over=best).high >= 1.0]

    def to_json(self) -> dict[str, Any]:
        """All numbers, down to the single step."""
        return {
            "title": self.title,
            "baseline": self.baseline,
            "winners": self.winners,
            "median_ms": {name: asdict(self.time_ms(name)) for name in self.times_ms},
            "speed_over_baseline": {name: asdict(self.speed(name)) for name in self.times_ms},
            "times_ms": {name: [list(b) for b in found] for name, found in self.times_ms.items()},
        }


def rounds_of(comparison: Comparison, parity: int) -> Comparison:
    """Return every other round: a choice made on one half is judged on the other."""
    times = {name: blocks[parity::2] for name, blocks in comparison.times_ms.items()}
    return Comparison(comparison.title, comparison.baseline, times, comparison.aside)


def join_rounds(launches: Sequence[Mapping[str, Sequence[Any]]]) -> dict[str, list[Any]]:
    """Put the rounds of several launches one after the other."""
    return {name: [r for launch in launches for r in launch[name]] for name in launches[0]}
