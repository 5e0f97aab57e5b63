"""glibc's malloc, told what to do with large blocks: by itself it changes its mind as it goes.

By default glibc maps large blocks or takes them from the heap depending on what was freed before,
and gives the end of the heap back when enough of it is free. A 16 MB gradient then costs 4,000 page
faults or none, by luck: in five runs of the same MLP step we saw 9 to 10,700 faults a step.
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD = 32 * 1024 * 1024
_NEVER = 2**31 - 1


def keep_memory() -> None:
    """Reuse freed memory, never return it: steps then fault no pages in. For times."""
    _set(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    _set(_TRIM_THRESHOLD, _NEVER)


def return_memory(above_bytes: int) -> None:
    """Return every block of this size when it is freed: RSS then shows what lives. For memory."""
    _set(_MMAP_THRESHOLD, above_bytes)
    _set(_TRIM_THRESHOLD, above_bytes)


def _set(option: int, value: int) -> None:
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # musl has no mallopt; glibc returns 0 if it refuses.
    if mallopt is not None and mallopt(option, value) == 0:
        raise OSError(f"mallopt({option}, {value}) was refused")
