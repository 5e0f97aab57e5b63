"""Reads small files whose contents are not trusted: sizes are bounded, types are checked.

They lie in run folders, which may come from another machine, be damaged, or be half written. Used
by whatever reads JSON there. Must not know what the files mean.
"""

from __future__ import annotations

import json
import math
import os
import stat
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

MAX_JSON_BYTES = 8 << 20
MAX_PID = 1 << 22
"""The most that Linux has, on any machine."""

MAKES_NO_SENSE = (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError)
"""What reading such a file may raise; a UnicodeDecodeError is a ValueError."""

_MAX_NUMBER = 1 << 63
_T = TypeVar("_T")


def read_bounded(path: str | os.PathLike[str], limit: int) -> bytes:
    """Return what a file holds; a pipe or a device is refused, not waited for.

    Raises:
        OSError: It cannot be read.
        ValueError: It is larger than ``limit``, or no regular file.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError(f"{path} is not a regular file")
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"{path} has more than {limit} bytes")
    return data


def read_fields(path: Path, kind: type[_T], limit: int = MAX_JSON_BYTES) -> _T:
    """Return a dataclass from a JSON object that has all of its fields; others are ignored.

    Raises:
        OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError: There is none, or
            none that makes sense: see MAKES_NO_SENSE.
    """
    found = json.loads(read_bounded(path, limit))
    names = {each.name: str(each.type) for each in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: _checked(declared, found[name]) for name, declared in names.items()})


def _checked(declared: str, value: Any) -> Any:
    if declared == "float":
        return _finite(value)
    if declared == "tuple[str, ...]":
        return tuple(_checked("str", each) for each in _checked("list", value))
    if declared == "dict[str, str]":
        found = _checked("dict", value)
        return {name: _checked("str", each) for name, each in found.items()}
    kinds: dict[str, type] = {"int": int, "str": str, "bool": bool, "list": list, "dict": dict}
    if type(value) is not kinds[declared]:
        raise TypeError(f"a {type(value).__name__} is no {declared}")
    if isinstance(value, int) and not -_MAX_NUMBER <= value < _MAX_NUMBER:
        raise ValueError("a number that has more than 64 bits")
    # JSON can say half of a character, which no file and no terminal can.
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _finite(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise TypeError(f"a {type(value).__name__} that is no finite number")
    return float(value)
