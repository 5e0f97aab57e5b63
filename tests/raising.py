"""What a call raises, as ranks can send it: for tests that compare our errors with torch's."""

from __future__ import annotations

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
