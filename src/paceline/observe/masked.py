"""Secrets among the words of a command, which run.json, the report and ``paceline doctor`` show.

Called by ``paceline run`` before it stores the command. Goes by the names of options: nothing else
is known of the arguments of a script.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_SECRET = re.compile(r"key|passw|pwd|secret|credential|token(?!i[sz])", re.IGNORECASE)
_ASSIGNED = re.compile(r"([-\w.+]+)=.")
MASK = "***"


def masked(words: Sequence[str]) -> tuple[str, ...]:
    """Hide the values of options that are secrets by their names: ``--api-key X``, ``token=X``.

    A count of tokens (``--max-tokens 512``) is none.
    """
    found = list(words)
    for number, word in enumerate(words):
        before = words[number - 1] if number else ""
        if (match := _ASSIGNED.match(word)) and _SECRET.search(match[1]):
            name, _, value = word.partition("=")
            found[number] = word if _is_count(name, value) else f"{name}={MASK}"
        elif (
            before.startswith("-")
            and "=" not in before
            and not word.startswith("-")
            and _SECRET.search(before)
            and not _is_count(before, word)
        ):
            found[number] = MASK
    return tuple(found)


def _is_count(name: str, value: str) -> bool:
    return "tokens" in name.lower() and value.isdigit()
