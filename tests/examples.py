"""How many examples hypothesis draws: a tenth of them in `make test`, all in `make test-all`."""

from __future__ import annotations

import os

FEWEST = 5
ARE_FEW = os.environ.get("PACELINE_EXAMPLES") == "few"


def examples(number: int) -> int:
    """For ``max_examples``."""
    return max(FEWEST, number // 10) if ARE_FEW else number
