"""Two hosts with uneven numbers of ranks end with the bits of one rank."""

from __future__ import annotations

import pytest

from paceline.testing.hosts import hosts_unavailable_reason, run_on_hosts, test_hosts
from tests.shards.one_rank import LONG_NAMES, LONG_STEPS, on_one_rank
from tests.shards.trainings import train_all

test_hosts.__test__ = False  # type: ignore[attr-defined]
NAMES = ("cnn", "embedding", "unused", "weighted", "synced")


@pytest.mark.skipif(hosts_unavailable_reason() is not None, reason=str(hosts_unavailable_reason()))
@pytest.mark.parametrize("ranks", [[1, 2], pytest.param([3, 1], marks=pytest.mark.slow)])
def test_uneven_hosts(ranks: list[int]) -> None:
    compare_with_one_rank(ranks, NAMES, 4)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(hosts_unavailable_reason() is not None, reason=str(hosts_unavailable_reason()))
def test_a_thousand_steps() -> None:
    """As ``test_long.py``."""
    compare_with_one_rank([2, 1], LONG_NAMES, LONG_STEPS)


def compare_with_one_rank(ranks: list[int], names: tuple[str, ...], steps: int) -> None:
    with test_hosts(2) as hosts:
        told = run_on_hosts(hosts, ranks, train_all, list(names), steps, ["auto"], timeout_s=3000)
    for found in told:
        assert list(found.values()) == on_one_rank(names, steps)
