"""The cases of ``cases.py`` and ``more_cases.py``, on every backend and several numbers of ranks.

All cases of one backend and number run in one set of processes, one after the other.
"""

from __future__ import annotations

import os
import warnings

import pytest
import torch
import torch.distributed as dist

from paceline.testing import run_ranks
from tests.shm.contract import more_cases  # noqa: F401 (registers)
from tests.shm.contract.cases import CASES, FEWEST
from tests.shm.contract.subjects import TIMEOUT, subject


def run_cases(name: str) -> list[str]:
    """Run all cases that this many ranks can run; return their names."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = os.environ["PACELINE_TEST_INIT_METHOD"]
    titles = [title for title in CASES if FEWEST[title] <= world]
    # Some groups of several hosts have one rank on each: these are told so, and are gloo's.
    warnings.filterwarnings("ignore", message="The paceline group works over gloo")
    with subject(name, rank, world) as backend:
        options = {"rank": rank, "world_size": world, "init_method": address, "timeout": TIMEOUT}
        dist.init_process_group(backend, **options)
        for title in titles:
            CASES[title]()
            # Not gloo's barrier: it also waits for collectives before it, and raises the errors of
            # those that a case has seen failing.
            dist.all_reduce(torch.zeros(1))
        dist.destroy_process_group()
    return titles


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param("gloo", 1, marks=pytest.mark.slow),
        ("gloo", 2),
        ("paceline", 1),
        pytest.param("paceline", 2, marks=pytest.mark.slow),
        ("paceline", 3),
        ("two hosts", 4),
    ],
)
def test_contract(name: str, ranks: int) -> None:
    found = run_ranks(ranks, run_cases, name, init=False, timeout_s=250)
    assert len(found[0]) > 20
    assert found == [found[0]] * ranks
