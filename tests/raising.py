"""What a call raises or warns of, as ranks can send it: tests compare ours with torch's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

Raised = tuple[list[str], str]
"""The names of the exception's class and its bases, and its text."""


def error_of(action: Callable[[], Any]) -> Raised:
    """Call it."""
    try:
        action()
    except Exception as error:
        return [kind.__name__ for kind in type(error).__mro__], str(error)
    return [], "no error"


def warnings_of(action: Callable[[], Any]) -> list[tuple[str, str]]:
    """Call it; return the category and the text of each warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [(each.category.__name__, str(each.message)) for each in caught]
