"""Shared memory that somebody has overwritten: an error, never a crash or an endless wait.

docs/protocol.md promises that what peers write is checked where a mistake would crash a reader.
"""

from __future__ import annotations

import pytest

from paceline.native.extension import missing_reason
from tests.shm.attach import damage
from tests.shm.worker_pool import RankResult, WorkerPool, with_workers

pytestmark = pytest.mark.skipif(missing_reason() is not None, reason=str(missing_reason()))

ROUNDS = 12


def play_all(job: object, each: list[tuple[object, ...]], world: int = 2) -> list[list[RankResult]]:
    def part(workers: WorkerPool) -> list[list[RankResult]]:
        return [workers.run(world, job, *arguments) for arguments in each]  # type: ignore[arg-type]

    found: list[list[RankResult]] = with_workers(part)
    for results, arguments in zip(found, each, strict=True):
        assert [one.signal for one in results] == [0] * world, arguments
        assert [one.left for one in results] == [[]] * world, arguments
    return found


def test_a_header_that_does_not_fit_is_refused_by_all() -> None:
    sizes = (0, 1, 4095, 4096, 1 << 19, (1 << 20) + 64, 1 << 21, 1 << 40, 1 << 63, (1 << 64) - 64)
    slots: list[tuple[object, ...]] = [(16, "<Q", size) for size in sizes]
    others: list[tuple[object, ...]] = [(0, "<Q", 0), (8, "<I", 99), (12, "<I", 3), (12, "<I", 0)]
    for results in play_all(damage.bad_header, slots + others):
        reasons = {one.value for one in results}
        assert len(reasons) == 1
        assert "the control segment has" in reasons.pop()


def test_a_verdict_that_no_rank_writes() -> None:
    by, about = 1 << 8, 1 << 32
    verdicts = (
        1 + 77 * about,  # lost: a rank that there is not
        1 + 0xFFFFFFFF * about,
        2 + 9 * by,  # timed out, says a rank that there is not
        2 + 5 * about,
        3 + 0xFFFFFF * by,
        9,
        255 + by,
        by,  # nothing, but not zero
        (1 << 64) - 1,
    )
    words = [([(damage.VERDICT, "<Q", verdict)],) for verdict in verdicts]
    for results in play_all(damage.bad_words, words):  # type: ignore[arg-type]
        for one in results:
            assert len(one.value) == 2
            for text in one.value:
                assert text.startswith("CollectiveError: ")
                assert "has overwritten them" in text


def test_a_count_that_no_rank_could_have_reached() -> None:
    """Everybody has arrived, and the phase is not complete: found at the deadline."""
    (results,) = play_all(damage.bad_words, [([(damage.ARRIVED, "<I", 0xFFFFFF00)],)])
    for one in results:
        assert all(text.startswith("CollectiveError: ") for text in one.value), one.value
        assert any("has overwritten them" in text for text in one.value)


def test_rows_and_tickets_with_anything_in_them() -> None:
    row = damage.ROWS + damage.ROW_BYTES  # rank 1's
    words: list[tuple[object, ...]] = [
        ([(row + offset, "<Q", value)],)
        for offset in (0, 8, 16, damage.TICKETS, damage.TICKETS + 16)
        for value in (3, (1 << 64) - 1)
    ]
    for results in play_all(damage.bad_words, words):
        for one in results:
            assert all(text == "nothing" or "Error: Rank" in text for text in one.value), one.value


def test_a_vandal_among_the_ranks() -> None:
    found = play_all(damage.vandalised, [(seed,) for seed in range(ROUNDS)])
    assert all(results[1].value["writes"] > 0 for results in found)
    ended = [one.value["error"] for results in found for one in results]
    assert sum(error is not None for error in ended) >= ROUNDS  # the damage was felt
