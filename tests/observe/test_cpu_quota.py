"""Throttling by a cgroup: the kernel's files of both versions, and a real quota as root."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.observe.cpu_quota import find_cpu_stat, read_throttled_ns

V1 = "nr_periods 9\nnr_throttled 3\nthrottled_time 1234567\n"
V2 = "usage_usec 5\nnr_periods 9\nnr_throttled 3\nthrottled_usec 1234\n"


@pytest.mark.parametrize(
    ("line", "folder", "text", "found_ns"),
    [
        ("0::/job", "job", V2, 1_234_000),
        ("0::/not/here", ".", V2, 1_234_000),  # a container: its own cgroup is the root
        ("4:cpu,cpuacct:/job", "cpu,cpuacct/job", V1, 1_234_567),
        ("4:cpu:/job", "cpu/job", V1, 1_234_567),
    ],
)
def test_both_versions(tmp_path: Path, line: str, folder: str, text: str, found_ns: int) -> None:
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    (tmp_path / folder / "cpu.stat").write_text(text)
    membership = tmp_path / "membership"
    membership.write_text(f"7:pids:/job\n{line}\n")
    found = find_cpu_stat(membership, tmp_path)
    assert found is not None
    assert read_throttled_ns(found) == found_ns


def test_no_cgroups(tmp_path: Path) -> None:
    assert find_cpu_stat(tmp_path / "none", tmp_path) is None
    assert read_throttled_ns(tmp_path / "none") == 0


BUSY = """
import sys, time
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text("0")
from paceline.observe.process_usage import ProcessUsage
usage = ProcessUsage()
began = usage.throttled_ns
while usage.throttled_ns == began:  # the test's deadline ends it if the kernel never throttles
    usage._next_s = usage._next_memory_s = 0.0
    usage.refresh()
print("throttled")
"""


@pytest.mark.slow
def test_a_real_quota() -> None:
    cpu = Path("/sys/fs/cgroup/cpu")
    if os.getuid() != 0 or not (cpu / "cpu.cfs_quota_us").exists():
        pytest.skip("needs root and the cpu controller of cgroups, version 1")
    group = cpu / f"paceline-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text("10000")
        (group / "cpu.cfs_quota_us").write_text("2000")
        command = [sys.executable, "-c", BUSY, str(group)]
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        assert found.stdout == "throttled\n"
    finally:
        group.rmdir()
