"""The frames of a thread, and which of them are the user's own: the place that a report names."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from types import FrameType

from paceline.exit_reason import is_library

_INSTALLED = f"{os.sep}site-packages{os.sep}"
_PYTHON = sysconfig.get_paths()["stdlib"] + os.sep


def own_frame(files: Sequence[str]) -> int:
    """Return which of these files, innermost first, is the user's; -1 if none is.

    What is neither installed nor Python's own comes first; then what is at least not torch's.
    """
    for number, file in enumerate(files):
        if not is_library(file) and _INSTALLED not in file and not file.startswith(_PYTHON):
            return number
    return next((i for i, file in enumerate(files) if not is_library(file)), -1)


def walk_out(innermost: FrameType | None) -> Iterator[FrameType]:
    """This frame, its caller, and so on."""
    frame = innermost
    while frame is not None:
        yield frame
        frame = frame.f_back
