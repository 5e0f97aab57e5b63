"""What trainings on one rank end with: what all others are compared with, computed once."""

from __future__ import annotations

import functools
import os

from paceline.testing import run_ranks
from tests.shards.trainings import LONG, MATRIX, train_all

IS_LONG = bool(os.environ.get("PACELINE_LONG"))
MATRIX_NAMES = tuple(MATRIX)
MATRIX_STEPS = 40
LONG_NAMES = tuple(LONG)
LONG_STEPS = 1000 if IS_LONG else 40


@functools.cache
def on_one_rank(names: tuple[str, ...], steps: int) -> list[str]:
    """Return the digest of each training."""
    return list(run_ranks(1, train_all, list(names), steps, ["c10d"], timeout_s=2400)[0].values())
