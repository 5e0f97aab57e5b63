"""Which versions of torch Paceline supports.

Called once, when the first private name is asked for. Knows nothing of what the names are for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

OLDEST, NEWEST = (2, 13), (2, 15)
"""With which of them what was run: docs/torch-versions.md."""

SUPPORTED = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
_WANTED = f"torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"
REMEDY = f'Paceline supports torch {SUPPORTED}: install "{_WANTED}".'


def complaint_about(version: str, missing: Mapping[str, str] | None = None) -> str:
    """What to tell somebody who has this torch; empty if there is nothing to tell.

    Args:
        version: Of torch.
        missing: Private names that it does not have, with what needs each.
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    found = (int(numbers[1]), int(numbers[2])) if numbers else OLDEST
    parts = []
    if not OLDEST <= found <= NEWEST:
        how = "older" if found < OLDEST else "newer"
        parts.append(f"torch {version} is {how} than those that Paceline supports.")
    if missing:
        listed = "; ".join(f"{name} ({feature})" for name, feature in missing.items())
        parts.append(f"torch {version} does not have private names that Paceline uses: {listed}.")
    return " ".join([*parts, REMEDY]) if parts else ""
