"""Every model with every kind of training ends with the SHA-256 of one rank.

MLP, CNN with BatchNorm, transformer with dropout, embedding with sparse gradients; SGD, AdamW,
accumulation, a schedule of the learning rate; 2, 3, 4 and 8 ranks in shared memory and over gloo.
``test_hosts.py`` has the same on two hosts, ``test_elastic.py`` through kills, joins and resizes.
40 steps, and with PACELINE_LONG 1,000.
"""

from __future__ import annotations

import pytest

from paceline.testing import run_ranks
from tests.shards.one_rank import MATRIX_NAMES, MATRIX_STEPS, on_one_rank
from tests.shards.trainings import train_all

pytestmark = [pytest.mark.slow, pytest.mark.timeout(6000)]


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_matrix(world: int, transport: str) -> None:
    names = list(MATRIX_NAMES)
    told = run_ranks(world, train_all, names, MATRIX_STEPS, [transport], timeout_s=3000)
    for found in told:
        assert list(found.values()) == on_one_rank(MATRIX_NAMES, MATRIX_STEPS)
