"""What a process may use and is denied: the kernel's files, and a real quota as root."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cores import cpu_quota, find_cpu_stat, read_stolen_ns, read_throttled_ns
from tests.system import cpu_cgroup

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


@pytest.mark.parametrize(
    ("line", "files", "quota"),
    [
        ("0::/job/a", {"job/a/cpu.max": "max 100000", "job/cpu.max": "150000 100000"}, 1.5),
        ("0::/job", {"job/cpu.max": "max 100000"}, None),
        ("0::/not/here", {"cpu.max": "400000 100000"}, 4.0),
        ("4:cpu:/j", {"cpu/j/cpu.cfs_quota_us": "50000", "cpu/j/cpu.cfs_period_us": "100000"}, 0.5),
        ("4:cpu:/j", {"cpu/j/cpu.cfs_quota_us": "-1", "cpu/j/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_quota(tmp_path: Path, line: str, files: dict[str, str], quota: float | None) -> None:
    """The smallest of the cgroups around this process."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
        (tmp_path / name).with_name("cpu.stat").touch()
    membership = tmp_path / "membership"
    membership.write_text(f"{line}\n")
    assert cpu_quota(membership, tmp_path) == quota


def test_stolen(tmp_path: Path) -> None:
    """The mean of the cores that are asked about, not of the machine."""
    tick_ns = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu  9 9 9 9 9 9 9 900 0 0\n"
        "cpu0 1 2 3 4 5 6 7 100 0 0\ncpu1 1 2 3 4 5 6 7 300 0 0\ncpu10 1 2 3 4 5 6 7 500 0 0\n"
        "intr 5 5\n"
    )
    assert read_stolen_ns({1}, stat) == 300 * tick_ns
    assert read_stolen_ns({0, 1}, stat) == 200 * tick_ns
    assert read_stolen_ns({7}, stat) == read_stolen_ns({1}, tmp_path / "none") == 0
    assert read_stolen_ns() >= 0


BUSY = """
import sys, time
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text("0")
from paceline.cores import cpu_quota
from paceline.observe.process_usage import ProcessUsage
print(cpu_quota())
usage = ProcessUsage()
began = usage.throttled_ns
while usage.throttled_ns == began:  # the test's deadline ends it if the kernel never throttles
    usage._next_s = usage._next_memory_s = 0.0
    usage.refresh()
print("throttled")
"""


@pytest.mark.slow
def test_a_real_quota() -> None:
    with cpu_cgroup(quota_us=2_000, period_us=10_000) as group:
        command = [sys.executable, "-c", BUSY, str(group)]
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        assert found.stdout == "0.2\nthrottled\n"
