"""Makes text that others wrote fit for a terminal; long lists and sizes, for people.

Called wherever a peer's words, or those of a file, are shown. Must not know who wrote them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_STYLES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
"""Colours and movements of the cursor, as terminals take them."""

SHOWN_CHARACTERS = 2000
"""How much of a text is shown, if nothing else is said."""


def printable(text: Any, limit: int = SHOWN_CHARACTERS) -> str:
    """Make text fit to be shown: bounded, without control characters but line ends."""
    bounded = str(text)[:limit]
    return "".join(c if c.isprintable() or c == "\n" else " " for c in bounded)


def listed(names: Sequence[object], most: int) -> str:
    """Name the first few: ``a, b and 3 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def size_text(size_bytes: float) -> str:
    """Bytes, for people: ``2.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size_bytes < 1000 or unit == "TiB":
            break
        size_bytes /= 1024
    return f"{size_bytes:.3g} {unit}"


def printable_line(text: str, limit: int = SHOWN_CHARACTERS) -> str:
    """The same for one line of a program's output, without its colours; says what is left out."""
    plain = _STYLES.sub("", text)
    more = f" ... ({len(plain) - limit} more characters)" if len(plain) > limit else ""
    return printable(plain, limit) + more
