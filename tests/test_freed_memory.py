"""Freed memory stays in the process once a wrapper was made, unless somebody wants otherwise."""

from __future__ import annotations

import ctypes
import os
import resource
import sys

import pytest
import torch
import torch.nn as nn

from paceline import DistributedDataParallel
from paceline.freed_memory import KEEP_VARIABLE
from paceline.testing import run_ranks

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallopt") or sys.platform != "linux",
    reason="needs glibc's malloc",
)

# Two blocks side by side are above the 32 MB from which on glibc trims its heap.
BLOCK_ELEMENTS = 5 * 1024 * 1024
PAGE_BYTES = 4096


def faults_of_blocks(wraps: bool, variables: dict[str, str]) -> int:
    """Count the page faults of blocks that were allocated and freed before."""
    os.environ.update(variables)
    if wraps:
        DistributedDataParallel(nn.Linear(2, 2))
    touch_blocks()
    touch_blocks()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    touch_blocks()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def touch_blocks() -> None:
    blocks = [torch.zeros(BLOCK_ELEMENTS).add_(1) for _ in range(4)]
    del blocks


def faults(wraps: bool, **variables: str) -> int:
    return run_ranks(1, faults_of_blocks, wraps, variables)[0]


PAGES = 4 * BLOCK_ELEMENTS * 4 // PAGE_BYTES


def test_a_step_does_not_fault_in_what_the_last_one_freed() -> None:
    assert faults(False) > PAGES / 2, "malloc gives blocks back by itself: nothing is shown here"
    assert faults(True) < PAGES / 20


@pytest.mark.parametrize(
    "variables",
    [{KEEP_VARIABLE: "0"}, {"MALLOC_TRIM_THRESHOLD_": "131072"}],
    ids=lambda variables: next(iter(variables)),
)
def test_who_wants_otherwise_is_left_alone(variables: dict[str, str]) -> None:
    assert faults(True, **variables) > PAGES / 2
