"""Many steps (a thousand with PACELINE_LONG) on 4 and 8 ranks end with the SHA-256 of one rank.

``test_elastic.py`` has as many on 2, 3 and 4 ranks in shared memory, ``test_hosts.py`` on 3 of two
hosts.
"""

from __future__ import annotations

import pytest

from paceline.testing import run_ranks
from tests.shards.one_rank import FOUR_MODELS, MANY_STEPS, on_one_rank
from tests.shards.trainings import train_all

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3200)]


@pytest.mark.parametrize(("world", "transport"), [(8, "shm"), (4, "c10d")])
def test_many_steps(world: int, transport: str) -> None:
    told = run_ranks(world, train_all, list(FOUR_MODELS), MANY_STEPS, [transport], timeout_s=1500)
    for found in told:
        assert list(found.values()) == on_one_rank(FOUR_MODELS, MANY_STEPS)
