"""glibc's malloc, told what to do with large blocks: by itself it changes its mind as it goes.

By default glibc maps large blocks or takes them from the heap depending on what was freed before,
and gives the end of the heap back when enough of it is free. A 16 MB gradient then costs 4,000 page
faults or none, by luck: in five runs of the same MLP step we saw 9 to 10,700 faults a step.
Paceline's wrapper tells malloc to keep memory (``paceline.freed_memory``). A benchmark that runs
several wrappers in one process says here what holds for all of them.
"""

from __future__ import annotations

import os

from paceline.freed_memory import (
    KEEP_VARIABLE,
    LARGEST_MMAP_THRESHOLD,
    NEVER,
    set_thresholds,
)


def keep_memory() -> None:
    """Reuse freed memory, never return it: steps then fault no pages in. For times."""
    leave_alone()
    set_thresholds(LARGEST_MMAP_THRESHOLD, NEVER)


def return_memory(above_bytes: int) -> None:
    """Return every block of this size when it is freed: RSS then shows what lives. For memory."""
    leave_alone()
    set_thresholds(above_bytes, above_bytes)


def leave_alone() -> None:
    """Keep Paceline's wrapper from telling malloc something else."""
    os.environ[KEEP_VARIABLE] = "0"
