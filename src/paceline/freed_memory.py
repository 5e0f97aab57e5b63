"""Keeps freed memory in the process, because the next step needs it again.

glibc's malloc hands large freed blocks back to the system, and takes them from it anew in the next
step: a page fault for every 4 KiB. Which blocks is a matter of luck (what lies above them on the
heap), so one rank may fault 12,000 times in each step of the same job and another never; all wait
for it. The wrapper therefore tells malloc once to keep what was freed. The highest resident memory
stays as it was; between peaks less is given back. ``malloc_trim(0)`` still returns all of it.

Called by the DDP wrapper. Somebody who set malloc up themselves is left alone.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys

KEEP_VARIABLE = "PACELINE_KEEP_MEMORY"
"""Set to 0, malloc is left as it is."""

_OWN_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
LARGEST_MMAP_THRESHOLD = 32 * 1024 * 1024
"""glibc does not take more; larger blocks are always mapped, and returned when they are freed."""
NEVER = 2**31 - 1


@functools.cache
def keep_freed_memory() -> bool:
    """Tell malloc to keep what is freed, unless somebody wants otherwise. Return if it does."""
    if os.environ.get(KEEP_VARIABLE, "1") == "0" or _is_set_up_by_user():
        return False
    return set_thresholds(LARGEST_MMAP_THRESHOLD, NEVER)


def set_thresholds(mmap_bytes: int, trim_bytes: int) -> bool:
    """Set from which size on blocks are mapped, and when the heap is trimmed.

    Returns:
        Whether this process has glibc's malloc, and it took them.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, mmap_bytes) and mallopt(_TRIM_THRESHOLD, trim_bytes))


def _is_set_up_by_user() -> bool:
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return "glibc.malloc." in tunables or any(name in os.environ for name in _OWN_SETTINGS)
