"""Speed, side by side in one run: over shaped links, and PowerSGD's compression beside torch's.

The machine may be busy: the best of the rounds counts, and a run that misses is repeated. Medians
of interleaved rounds are not steadier: on two cores that others used too, int8 over no hook was
2.24, 1.86 and 2.49 by the medians of five rounds, and 2.35, 2.44 and 2.73 by the best of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest

from benchmarks.hooks_link import Samples, measure
from benchmarks.powersgd_compress import ratios, run_rank
from paceline.testing import run_ranks
from paceline.testing.hosts import hosts_unavailable_reason

# They judge speed, so they want the machine for themselves.
pytestmark = pytest.mark.alone
REASON = hosts_unavailable_reason()
needs_hosts = pytest.mark.skipif(REASON is not None, reason=str(REASON))
ATTEMPTS = 3


def best_ms(samples: Samples, name: str) -> float:
    return min(seconds for seconds, _ in samples[name]) * 1e3


def until_met(attempt: Callable[[], dict[str, tuple[float, float]]]) -> None:
    """Repeat until every value reaches its target."""
    seen = []
    for _ in range(ATTEMPTS):
        seen.append(attempt())
        if all(value >= target for value, target in seen[-1].values()):
            return
    pytest.fail(f"(found, wanted) in {ATTEMPTS} attempts: {seen}")


@needs_hosts
@pytest.mark.timeout(900)
def test_hooks_over_1_gbit() -> None:
    names = ["no hook", "int8", "fp16", "torch's fp16", "powersgd", "torch's powersgd"]

    def attempt() -> dict[str, tuple[float, float]]:
        samples = measure("mlp", names, ["1gbit"], rounds=4, timeout_s=250)["1gbit"]
        best = {name: best_ms(samples, name) for name in names}
        return {
            "int8 over no hook": (best["no hook"] / best["int8"], 2.0),
            # Not slower, but for what two runs of the same differ by.
            "fp16 over torch's": (best["torch's fp16"] / best["fp16"], 0.93),
            "powersgd over torch's": (best["torch's powersgd"] / best["powersgd"], 1.0),
        }

    until_met(attempt)


@needs_hosts
@pytest.mark.timeout(900)
def test_int8_over_100_mbit() -> None:
    def attempt() -> dict[str, tuple[float, float]]:
        samples = measure("mlp", ["no hook", "int8"], ["100mbit"], rounds=1, timeout_s=250)
        best = {name: best_ms(samples["100mbit"], name) for name in ("no hook", "int8")}
        return {"int8 over no hook": (best["no hook"] / best["int8"], 3.0)}

    until_met(attempt)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_power_sgd_compresses_at_least_as_fast_as_torchs(rank: int) -> None:
    def attempt() -> dict[str, tuple[float, float]]:
        [found] = run_ranks(1, run_rank, "transformer", rank, 9)
        return {"torch's over ours": (1 / statistics.median(ratios(found)), 1.0)}

    until_met(attempt)
