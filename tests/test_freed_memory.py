"""Freed memory stays in the process once a wrapper was made, unless somebody wants otherwise."""

from __future__ import annotations

import ctypes
import os
import resource
import statistics
import sys
from itertools import pairwise

import pytest
import torch
import torch.nn as nn

from paceline import DistributedDataParallel, freed_memory
from paceline.freed_memory import KEEP_VARIABLE, keep_freed_memory
from paceline.testing import run_ranks

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallopt") or sys.platform != "linux",
    reason="needs glibc's malloc",
)

# Two blocks side by side are above the 32 MB from which on glibc trims its heap.
BLOCK_ELEMENTS = 5 * 1024 * 1024
PAGE_BYTES = 4096


def faults_of_blocks() -> list[int]:
    """Make a wrapper, then count the page faults of blocks that were allocated and freed before."""
    DistributedDataParallel(nn.Linear(2, 2))
    touch_blocks()
    counts = [resource.getrusage(resource.RUSAGE_SELF).ru_minflt]
    for _ in range(5):
        touch_blocks()
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    return [after - before for before, after in pairwise(counts)]


def touch_blocks() -> None:
    blocks = [torch.zeros(BLOCK_ELEMENTS).add_(1) for _ in range(4)]
    del blocks


def test_a_step_does_not_fault_in_what_the_last_one_freed() -> None:
    """Without the wrapper it depends on luck, so only this way round can be tested.

    Some small block that comes to lie between the large ones may make the heap grow, once or twice.
    """
    pages = 4 * BLOCK_ELEMENTS * 4 // PAGE_BYTES
    (faults,) = run_ranks(1, faults_of_blocks)
    assert statistics.median(faults) < pages / 20, faults


def is_kept_by(variables: dict[str, str]) -> tuple[int, bool]:
    """Make a wrapper; return how often it asked, and whether malloc was told something."""
    os.environ.update(variables)
    told = []
    freed_memory.set_thresholds = lambda *sizes: bool(told.append(sizes)) or True
    DistributedDataParallel(nn.Linear(2, 2))
    return keep_freed_memory.cache_info().misses, bool(told)


@pytest.mark.parametrize(
    ("variables", "is_kept"),
    [
        ({}, True),
        ({KEEP_VARIABLE: "1"}, True),
        ({KEEP_VARIABLE: "0"}, False),
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False),
        ({"GLIBC_TUNABLES": "glibc.malloc.tcache_count=3"}, False),
        ({"GLIBC_TUNABLES": "glibc.pthread.rseq=0"}, True),
    ],
    ids=str,
)
def test_who_wants_otherwise_is_left_alone(variables: dict[str, str], is_kept: bool) -> None:
    assert run_ranks(1, is_kept_by, variables) == [(1, is_kept)]
