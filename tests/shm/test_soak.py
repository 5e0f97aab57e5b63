"""Very many collectives: neither memory nor descriptors nor threads grow."""

from __future__ import annotations

import pytest

from paceline.shm.extension import missing_reason
from tests.shm import jobs
from tests.shm.crew import Crew, Played, with_crew

COLLECTIVES = 60_000


@pytest.mark.skipif(missing_reason() is not None, reason=str(missing_reason()))
@pytest.mark.timeout(110)
def test_nothing_grows() -> None:
    def part(crew: Crew) -> list[Played]:
        return crew.play(2, jobs.soak, COLLECTIVES)

    for each in with_crew(part):
        assert each.left == []
        looks = each.value
        assert len(looks) >= 10
        settled = looks[2]
        for rss_kib, descriptors, tasks in looks[3:]:
            assert rss_kib - settled[0] < 2048, looks
            assert (descriptors, tasks) == settled[1:], looks
