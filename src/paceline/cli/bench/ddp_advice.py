"""What to change, and what it would gain: sentences that follow from a comparison. Pure.

[Note: choose, then judge]
The best of ten settings looks better than it is, because luck is part of why it is the best. So a
setting is chosen by every other round, and what it gains is taken from the rounds in between. A
gain whose interval includes none is no gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.cli.bench.harness.comparison import Comparison, rounds_of
from paceline.cli.bench.harness.contenders import (
    LOCAL,
    PACELINE,
    TORCH,
    TORCH_VIEWS,
    Contender,
)
from paceline.cli.bench.harness.estimates import Estimate, ratio

FEWEST_ROUNDS = 6


@dataclass(frozen=True)
class Gain:
    """How much less time a step takes after a change, in percent, with its interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.0f} % [{self.low:.0f}, {self.high:.0f}]"

    @property
    def as_difference(self) -> str:
        """The same as a change of time: above 0 is slower."""
        return f"{-self.value:+.0f} % [{-self.high:+.0f}, {-self.low:+.0f}]"

    @property
    def is_real(self) -> bool:
        """Whether the interval is above 0, and the gain worth a line of code."""
        return self.low > 0 and self.value >= 1


def gain(comparison: Comparison, old: str, new: str) -> Gain:
    """Return what changing from one contender to another gains."""
    found: Estimate = ratio(comparison.times_ms[new], comparison.times_ms[old])
    return Gain(100 * (1 - found.value), 100 * (1 - found.high), 100 * (1 - found.low))


def advise(comparison: Comparison, contenders: Sequence[Contender]) -> list[str]:
    """Say what to change in a script, what that gains, and when there is nothing to gain."""
    rounds = len(comparison.times_ms[PACELINE])
    if rounds < FEWEST_ROUNDS:
        return [f"no advice from {rounds} rounds: --rounds {FEWEST_ROUNDS} or more"]
    choosing, judging = rounds_of(comparison, 0), rounds_of(comparison, 1)
    exact = [each for each in contenders if each.change and each.reduces_exactly]
    lossy = [each for each in contenders if each.change and each.hook]
    sentences = [_about_torch(choosing, judging), *_about_rest(judging)]
    if exact:
        sentences.append(_about_settings(choosing, judging, exact))
    if lossy:
        sentences.append(_about_hooks(choosing, judging, lossy))
    return sentences


def _fastest(comparison: Comparison, names: Sequence[str]) -> str:
    return min(names, key=lambda name: comparison.time_ms(name).value)


def _about_torch(choosing: Comparison, judging: Comparison) -> str:
    better = _fastest(choosing, [TORCH, TORCH_VIEWS])
    found = gain(judging, better, PACELINE)
    whose = "torch's DDP" if better == TORCH else "torch's DDP with gradient_as_bucket_view"
    if found.is_real:
        return f"change: Paceline's DDP instead of {whose}: a step takes {found} less time"
    if found.high < 0:
        slower = Gain(-found.value, -found.high, -found.low)
        return f"keep {whose}: with Paceline's DDP a step takes {slower} more time"
    return f"nothing to gain by Paceline's DDP instead of {whose}: {found.as_difference} of time"


def _about_rest(judging: Comparison) -> list[str]:
    """What is left: no setting can gain more than communication costs now."""
    found = gain(judging, PACELINE, LOCAL)
    if found.high <= 0:
        return ["communication costs nothing that can be measured: no setting can gain anything"]
    return [f"communication that is not hidden takes {found} of a step: the most there is to gain"]


def _about_settings(
    choosing: Comparison, judging: Comparison, settings: Sequence[Contender]
) -> str:
    by_label = {each.label: each for each in settings}
    best = by_label[_fastest(choosing, list(by_label))]
    found = gain(judging, PACELINE, best.label)
    if found.is_real:
        return f"change: {best.change}: a step takes {found} less time than with our defaults"
    return (
        f"nothing to gain by transports and bucket sizes: the best of {len(settings)}, "
        f"{best.change}, changes the time of a step by {found.as_difference}"
    )


def _about_hooks(choosing: Comparison, judging: Comparison, hooks: Sequence[Contender]) -> str:
    by_label = {each.label: each for each in hooks}
    best = by_label[_fastest(choosing, list(by_label))]
    found = gain(judging, PACELINE, best.label)
    if found.is_real:
        return (
            f"possible: {best.change}: a step takes {found} less time, and gradients lose bits; "
            "`paceline bench hooks` measures what that costs in accuracy"
        )
    return (
        f"nothing to gain by hooks between ranks of this machine: the best, {best.change}, changes "
        f"the time of a step by {found.as_difference}; for a slow link see `paceline bench hooks`"
    )
