"""Many cases in one set of processes: to start them takes longer than most cases do.

Used by tests with a case for every hook. Each case is still a test of its own, with its own text.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence

import pytest

from paceline.testing import run_ranks


def run_together(
    world: int, check: Callable[[str], None], names: Sequence[str], timeout_s: float = 250
) -> dict[str, str]:
    """Check every name on every rank, and return what was wrong, by name.

    A check that fails on one rank only leaves the others in a collective: then all have failed.
    """

    def on_rank() -> dict[str, str]:
        wrong = {}
        for name in names:
            try:
                check(name)
            except (AssertionError, pytest.fail.Exception):
                wrong[name] = traceback.format_exc()
        return wrong

    merged: dict[str, str] = {}
    for rank, wrong in enumerate(run_ranks(world, on_rank, timeout_s=timeout_s)):
        merged |= {name: f"rank {rank}: {text}" for name, text in wrong.items()}
    return merged
