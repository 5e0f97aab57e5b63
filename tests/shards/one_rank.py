"""What trainings on one rank end with: what all others are compared with, computed once."""

from __future__ import annotations

import functools
import os

from paceline.testing import run_ranks
from tests.shards.trainings import train_all

FOUR_MODELS = ("mlp", "cnn", "transformer", "embedding")
MANY_STEPS = 1000 if os.environ.get("PACELINE_LONG") else 250


@functools.cache
def on_one_rank(names: tuple[str, ...], steps: int) -> list[str]:
    """Return the digest of each training."""
    return list(run_ranks(1, train_all, list(names), steps, ["c10d"], timeout_s=900)[0].values())
