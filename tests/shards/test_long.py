"""Every model with every kind of training ends with the SHA-256 of one rank.

MLP, CNN with BatchNorm, transformer with dropout, embedding with sparse gradients; SGD, AdamW,
accumulation, a schedule of the learning rate; 2, 3, 4 and 8 ranks in shared memory and over gloo.
Each kind of training by itself has 40 steps; a training of each model that has all of them at once
has 1,000 with PACELINE_LONG. ``test_hosts.py`` has the same on two hosts, ``test_elastic.py``
through kills, joins and resizes. All of the long ones, in about half an hour on 2 cores::

    PACELINE_LONG=1 make unit ARGS="tests/shards -k thousand"
"""

from __future__ import annotations

import pytest

from paceline.testing import run_ranks
from tests.shards.one_rank import (
    LONG_NAMES,
    LONG_STEPS,
    MATRIX_NAMES,
    MATRIX_STEPS,
    on_one_rank,
)
from tests.shards.trainings import train_all

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def compare(world: int, transport: str, names: tuple[str, ...], steps: int) -> None:
    told = run_ranks(world, train_all, list(names), steps, [transport], timeout_s=3000)
    for found in told:
        assert list(found.values()) == on_one_rank(names, steps)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_matrix(world: int, transport: str) -> None:
    compare(world, transport, MATRIX_NAMES, MATRIX_STEPS)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_a_thousand_steps(world: int, transport: str) -> None:
    compare(world, transport, LONG_NAMES, LONG_STEPS)
