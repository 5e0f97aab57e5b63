"""How long the cgroup of this process had no CPU quota left; containers have such limits.

Asked by :mod:`paceline.observe.process_usage` about once a second. Knows both versions of cgroups.
"""

from __future__ import annotations

from pathlib import Path

_MEMBERSHIP = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")


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
