"""How much memory a rank takes, as the kernel counts it. Linux only.

Memory that ranks share counts once, for the rank whose arena it is: what a rank has touched of its
peers' arenas is in its resident size too, but takes no memory of its own.
"""

from __future__ import annotations

import re
from pathlib import Path

_RESET_HIGH_WATER_MARK = "5"


def resident_bytes(name: str, rank: int) -> int:
    """Return a resident size (VmRSS, or VmHWM: the highest since the reset) without peers' arenas.

    Args:
        name: As in ``/proc/self/status``.
        rank: Of this process in the group that shares memory.
    """
    return _read(name) - peers_bytes(Path("/proc/self/smaps").read_text(), rank)


def reset_high_water_mark() -> None:
    """Let VmHWM begin anew."""
    Path("/proc/self/clear_refs").write_text(_RESET_HIGH_WATER_MARK)


def peers_bytes(smaps: str, rank: int) -> int:
    """Add up what is resident of the arenas of other ranks."""
    total, is_foreign = 0, False
    for line in smaps.splitlines():
        if match := re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            arena = re.search(r"/memfd:paceline-arena-(\d+)", line)
            is_foreign = arena is not None and int(arena[1]) != rank
        elif is_foreign and (match := re.match(r"Rss:\s+(\d+) kB$", line)):
            total += int(match[1]) * 1024
    return total


def available_bytes() -> int | None:
    """Return how much memory the machine has left; None where the kernel does not tell."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _read(name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match, f"the kernel does not tell {name}"
    return int(match[1]) * 1024
