"""Very many collectives: neither memory nor descriptors nor threads grow."""

from __future__ import annotations

import pytest

from paceline.native.extension import missing_reason
from tests.shm import jobs
from tests.shm.worker_pool import RankResult, WorkerPool, with_workers

COLLECTIVES = 120_000
MALLOC_KIB = 2048
"""By so much the heap goes up and down by itself. A leak of 36 bytes a collective is above it."""


@pytest.mark.skipif(missing_reason() is not None, reason=str(missing_reason()))
@pytest.mark.timeout(110)
@pytest.mark.alone
def test_nothing_grows() -> None:
    def part(workers: WorkerPool) -> list[RankResult]:
        return workers.run(2, jobs.soak, COLLECTIVES)

    for each in with_workers(part):
        assert each.left == []
        looks = each.value
        assert len(looks) >= 10
        half = len(looks) // 2
        highest_kib = [max(look[0] for look in part) for part in (looks[:half], looks[half:])]
        assert highest_kib[1] - highest_kib[0] < MALLOC_KIB, looks
        assert len({look[1:] for look in looks[2:]}) == 1, looks
