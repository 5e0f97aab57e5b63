"""Whether the kernel has killed a process of ours because memory ran out.

Asked by ``job.py`` before ranks start and when one was killed by SIGKILL. Reads the counter of the
launcher's cgroup (v2), which ranks share.
"""

from __future__ import annotations

from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def oom_kills(own: Path = Path("/proc/self/cgroup"), root: Path = _ROOT) -> int | None:
    """How often memory ran out in this cgroup so far; None where that is not counted."""
    try:
        path = next(line[3:].strip() for line in own.read_text().splitlines() if line[:3] == "0::")
        words = (root / path.lstrip("/") / "memory.events").read_text().split()
        return int(words[words.index("oom_kill") + 1])
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def explain_sigkill(before: int | None) -> str:
    """Why a rank may have got SIGKILL, which nobody in the job has sent."""
    now = oom_kills()
    if before is not None and now is not None and now > before:
        return (
            "memory ran out, and the kernel killed it (oom_kill in memory.events of this cgroup "
            f"went from {before} to {now}); use fewer ranks, smaller batches or a larger limit"
        )
    if now is not None:
        return "not by memory.events of this cgroup; somebody sent it, or the whole machine ran out"
    return "perhaps because memory ran out; then dmesg says so"
