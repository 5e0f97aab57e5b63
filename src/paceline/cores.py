"""How many cores this process may use, and how long it was denied them: by a cgroup's quota, or by
the hypervisor.

Asked by ``launch`` and ``doctor env`` for cores, and by :mod:`paceline.observe.process_usage` about
once a second for what was denied. Knows both versions of cgroups.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path

_MEMBERSHIP = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")
_STAT = Path("/proc/stat")
_STEAL = 8
"""Column of a core's line in /proc/stat, after its name."""


def usable_cores() -> int:
    """Cores that this process may use at a time: those that it may run on, or its quota of them."""
    quota = cpu_quota()
    return allowed_cores() if quota is None else max(1, min(allowed_cores(), int(quota)))


def allowed_cores() -> int:
    """Cores that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def core_list() -> str:
    """Which cores this process may run on, as the kernel lists them: ``0-3,8``; '' if unknown."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "Cpus_allowed_list":
                return value.strip()
    return ""


# --- the quota of a cgroup -----------------------------------------------------------------------


def cpu_quota(membership: Path = _MEMBERSHIP, root: Path = _ROOT) -> float | None:
    """How many cores' time the cgroup of this process, or one around it, may use; None: all."""
    cpu_stat = find_cpu_stat(membership, root)
    if cpu_stat is None:
        return None
    quotas = [quota for group in _upwards(cpu_stat.parent, root) if (quota := _quota_of(group))]
    return min(quotas, default=None)


def _upwards(group: Path, root: Path) -> Iterator[Path]:
    yield group
    while group not in (root, root.parent) and group != group.parent:
        group = group.parent
        yield group


def _quota_of(group: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        quota_us = int((group / "cpu.cfs_quota_us").read_text())
        return quota_us / int((group / "cpu.cfs_period_us").read_text()) if quota_us > 0 else None
    return None


def find_cpu_stat(membership: Path = _MEMBERSHIP, root: Path = _ROOT) -> Path | None:
    """The file in which the kernel counts throttling of this process's cgroup; None without one.

    In a container the cgroup's path may be that of the host, while its files are at the root.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for base in (root, root / "cpu", root / (controllers or "unified")):
            for place in (base / path.lstrip("/"), base):
                if (place / "cpu.stat").is_file():
                    return place / "cpu.stat"
    return None


def read_throttled_ns(cpu_stat: Path) -> int:
    """How long threads were kept from running because the quota was used up; it only grows."""
    try:
        pairs = (line.split() for line in cpu_stat.read_text().splitlines())
        counts = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
    except (OSError, ValueError):
        return 0
    return counts.get("throttled_time", counts.get("throttled_usec", 0) * 1000)


# --- the hypervisor ------------------------------------------------------------------------------


def read_stolen_ns(cores: Collection[int] | None = None, stat: Path = _STAT) -> int:
    """How long the hypervisor ran something else while a core had work: CPU steal.

    Args:
        cores: The mean of these; of those that this process may run on, if it is None.
        stat: The kernel's file.
    """
    if cores is None:
        cores = os.sched_getaffinity(0)
    names = {f"cpu{core}" for core in cores}
    try:
        rows = (line.split() for line in stat.read_text().splitlines() if line.startswith("cpu"))
        ticks = [int(row[_STEAL]) for row in rows if row[0] in names]
    except (OSError, ValueError, IndexError):
        return 0
    return sum(ticks) * 1_000_000_000 // (os.sysconf("SC_CLK_TCK") * len(ticks)) if ticks else 0
