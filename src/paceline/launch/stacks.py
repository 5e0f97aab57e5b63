"""Stacks of a child on request, also of one that hangs.

The child calls :meth:`StackFile.write_on_signal`; the owner asks with :func:`collect_stacks`. The
signal's handler is C code, so a child answers while Python cannot run; one that is stopped does
not.
"""

from __future__ import annotations

import faulthandler
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from paceline.launch.child import Child

STACK_SIGNAL = signal.SIGUSR1
"""Makes a child write the stacks of all its threads to its file."""
_WAIT_S = 1.0  # at most, for all children together


@dataclass(frozen=True)
class StackFile:
    """Where one child writes its stacks, and whatever else it has to say at its end."""

    path: Path

    def write_on_signal(self) -> TextIO:
        """In the child. The caller keeps the file open."""
        file = self.path.open("w")
        faulthandler.register(STACK_SIGNAL, file=file, all_threads=True)
        return file

    def read(self) -> str:
        """What was written so far."""
        try:
            return self.path.read_text(errors="replace")
        except FileNotFoundError:
            return ""


def collect_stacks(asked: Sequence[tuple[Child, StackFile]]) -> None:
    """Ask for stacks and wait until each child has written something and stopped writing."""
    for child, _ in asked:
        child.send_signal(STACK_SIGNAL)
    sizes: list[int] = []
    until_s = time.monotonic() + _WAIT_S
    while asked and time.monotonic() < until_s:
        time.sleep(0.02)
        before, sizes = sizes, [len(file.read()) for _, file in asked]
        if all(sizes) and sizes == before:
            return
