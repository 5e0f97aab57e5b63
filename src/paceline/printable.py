"""Makes text that others wrote fit for a terminal.

Called wherever a peer's words, or those of a file, are shown. Must not know who wrote them.
"""

from __future__ import annotations

import re
from typing import Any

_STYLES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
"""Colours and movements of the cursor, as terminals take them."""

SHOWN_CHARACTERS = 2000
"""How much of a text is shown, if nothing else is said."""


def printable(text: Any, limit: int = SHOWN_CHARACTERS) -> str:
    """Make text fit to be shown: bounded, without control characters but line ends."""
    bounded = str(text)[:limit]
    return "".join(c if c.isprintable() or c == "\n" else " " for c in bounded)


def printable_line(text: str, limit: int = SHOWN_CHARACTERS) -> str:
    """The same for one line of a program's output, without its colours; says what is left out."""
    plain = _STYLES.sub("", text)
    more = f" ... ({len(plain) - limit} more characters)" if len(plain) > limit else ""
    return printable(plain, limit) + more
