"""How many examples hypothesis draws: a tenth of them in `make test`, all in `make test-all`.

And which ones, where several processes must draw the same.
"""

from __future__ import annotations

import os
import random

from hypothesis import settings

FEWEST = 5
ARE_FEW = os.environ.get("PACELINE_EXAMPLES") == "few"


def examples(number: int) -> int:
    """For ``max_examples``."""
    return max(FEWEST, number // 10) if ARE_FEW else number


def draw_seed() -> int:
    """For ``hypothesis.seed``: always the same, or another one with the profile ``random``."""
    return 0 if settings.get_current_profile_name() == "repeatable" else random.getrandbits(32)
