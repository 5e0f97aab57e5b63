"""The protocol of docs/protocol.md: every interleaving of two ranks, most of three.

No rank takes anything but whole and right data, none sleeps although its phase is complete, all
come to an end, and if one dies too early all others raise.
"""

from __future__ import annotations

import pytest

from tests.shm.model.machine import Happenings
from tests.shm.model.search import explore

EVERYTHING = Happenings(deaths=2, deadlines=True, aborts=True, reuse=True)
KINDS = ("tiny", "rounds", "staged", "place")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", KINDS)
def test_two_ranks_whatever_follows_whatever(first: str, second: str) -> None:
    assert explore(f"{first} {second}", 2, EVERYTHING) > 8_000


@pytest.mark.timeout(60)
def test_two_ranks_for_long() -> None:
    """Slots and tickets go round more than twice."""
    assert explore("tiny staged rounds tiny tiny place staged", 2, Happenings(deaths=1)) > 15_000


@pytest.mark.timeout(60)
def test_two_ranks_all_kinds_in_a_row() -> None:
    assert explore("staged place tiny rounds", 2, EVERYTHING) > 60_000


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "kind", ["tiny", "rounds", "place", pytest.param("staged", marks=pytest.mark.slow)]
)
def test_three_ranks_of_which_one_dies(kind: str) -> None:
    assert explore(kind, 3, Happenings(deaths=1)) > 20_000


@pytest.mark.timeout(60)
def test_three_ranks_stopped_or_aborted() -> None:
    assert explore("place", 3, Happenings(deadlines=True, reuse=True)) > 50_000


@pytest.mark.timeout(60)
@pytest.mark.parametrize("script", ["staged", "place tiny", "rounds"])
def test_three_ranks_and_nothing_happens(script: str) -> None:
    """All return, nobody is taken for lost, and no sleeper is left in the count."""
    assert explore(script, 3) > 10_000
