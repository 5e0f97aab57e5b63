"""Copies of what states are made of: dicts, lists, tuples, numbers, texts; and the rare rest.

In place of ``copy.deepcopy``, which takes 20 us of every commit in training. Two places of a state
that hold one list get a list each, as on a rank that joins.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from paceline.native.extension import native

_NUMBERS_AND_TEXTS = frozenset((int, float, str, bool, type(None)))


def _copy_plain(value: Any, left_out: frozenset[str], otherwise: Callable[[Any], Any]) -> Any:
    kind = type(value)
    if kind in _NUMBERS_AND_TEXTS:
        return value
    if kind is dict:
        items = [(k, v) for k, v in value.items() if k not in left_out]
        return {k: _copy_plain(v, left_out, otherwise) for k, v in items}
    if kind is list or kind is tuple:
        return kind(_copy_plain(each, left_out, otherwise) for each in value)
    return otherwise(value)


copy_plain: Callable[[Any, frozenset[str], Callable[[Any], Any]], Any] = (
    _copy_plain if native is None else native.copy_plain
)
"""``copy_plain(value, left_out, otherwise)``: without the keys in ``left_out``; what is no plain
value is ``otherwise(value)``."""

_NOTHING: frozenset[str] = frozenset()


def copied_state(value: Any) -> Any:
    """Copy what ``state_dict`` returns."""
    return copy_plain(value, _NOTHING, copy.deepcopy)
