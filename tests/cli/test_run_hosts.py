"""``paceline run`` on two hosts: network namespaces with a launcher in each."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from paceline.testing.hosts import Hosts, hosts_unavailable_reason, test_hosts
from tests.cli.launched import environ, finish, start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        hosts_unavailable_reason() is not None, reason=str(hosts_unavailable_reason())
    ),
]
test_hosts.__test__ = False  # type: ignore[attr-defined]

SCRIPT = """
import os, sys, torch, torch.distributed as dist
from paceline import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(3, 3))
for step in range(3):
    if step == 2 and dist.get_rank() == int(sys.argv[1]): raise ValueError("no such label")
    model(torch.ones(1, 3)).sum().backward()
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE".split()
names.append("MASTER_ADDR")
print(*(os.environ[name] for name in names), model.stats().steps, flush=True)
dist.destroy_process_group()
"""


def launch_on(
    hosts: Hosts,
    number: int,
    ranks: int,
    folder: Path,
    *words: str,
    count: int = 2,
    is_numbered: bool = True,
    **more: str,
) -> subprocess.Popen[str]:
    env = environ(GLOO_SOCKET_IFNAME="link0", PACELINE_HOST_ID=f"host-{number}", **more)
    # All share a file system, and the run folder if ``folder`` is the same.
    options = ["-n", str(ranks), "--nnodes", str(count), "--run-dir", "run"]
    options += ["--node-rank", str(number)] if is_numbered else []
    options += ["--rdzv-endpoint", "10.77.0.1:29437", "--rdzv-id", "a-job"]
    return hosts._namespaces[number].call(
        lambda: start(*options, "train.py", *words, cwd=folder, env=env)
    )


def test_hosts_are_numbered_as_they_come(tmp_path: Path) -> None:
    """The same line on three hosts, as under torchrun."""
    (tmp_path / "train.py").write_text(SCRIPT)
    with test_hosts(3) as hosts:
        started = [
            launch_on(hosts, number, 1, tmp_path, "-1", count=3, is_numbered=False)
            for number in range(3)
        ]
        done = [finish(each) for each in started]
    assert [each.returncode for each in done] == [0, 0, 0], [each.stderr for each in done]
    assert done[0].stdout == "0 0 3 1 0 3 10.77.0.1 3\n"
    others = {done[1].stdout, done[2].stdout}
    assert others == {f"[{rank}] {rank} 0 3 1 {rank} 3 10.77.0.1 3\n" for rank in (1, 2)}


def test_ranks_of_two_hosts_train(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with test_hosts(2) as hosts:
        first = launch_on(hosts, 0, 1, tmp_path, "-1")
        second = launch_on(hosts, 1, 2, tmp_path, "-1")
        done = [finish(first), finish(second)]
    assert [each.returncode for each in done] == [0, 0], [each.stderr for each in done]
    assert done[0].stdout == "0 0 3 1 0 2 10.77.0.1 3\n"
    lines = sorted(done[1].stdout.splitlines())
    assert lines == ["[1] 1 0 3 2 1 2 10.77.0.1 3", "[2] 2 1 3 2 1 2 10.77.0.1 3"]
    assert {path.name for path in (tmp_path / "run").glob("*.log")} == {
        "rank0.log",
        "rank1.log",
        "rank2.log",
    }


def test_the_culprit_is_on_the_other_host(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with test_hosts(2) as hosts:
        first = launch_on(hosts, 0, 1, tmp_path, "2")
        second = launch_on(hosts, 1, 2, tmp_path, "2")
        done = [finish(first), finish(second)]
    assert [each.returncode for each in done] == [1, 1]
    assert "paceline run: on host 1, rank 2 (pid " in done[0].stderr
    assert "failed first: ValueError: no such label" in done[0].stderr
    assert "paceline run: rank 2 (pid " in done[1].stderr


def test_host_0_ends_first(tmp_path: Path) -> None:
    """It waits for the others, and hears of their end."""
    late = "import time; time.sleep(2.0 * int(os.environ['RANK']))\n"
    (tmp_path / "train.py").write_text(SCRIPT + late)
    with test_hosts(2) as hosts:
        first = launch_on(hosts, 0, 1, tmp_path, "-1")
        second = launch_on(hosts, 1, 1, tmp_path, "-1")
        done = [finish(first), finish(second)]
    assert [each.returncode for each in done] == [0, 0], [each.stderr for each in done]


STALLS = """
import os, sys, time, torch, torch.distributed as dist
from paceline import DistributedDataParallel
dist.init_process_group("gloo")
class Slow(torch.nn.Linear):
    def forward(self, x):
        until_s = time.monotonic() + 120
        while step == 4 and dist.get_rank() == 1 and not told() and time.monotonic() < until_s:
            time.sleep(0.05)
        return super().forward(x)
def told():
    logs = [open(each).read() if os.path.exists(each) else "" for each in sys.argv[2:]]
    return all(any(word in log for word in sys.argv[1].split("|")) for log in logs)
model = DistributedDataParallel(Slow(3, 3))
for step in range(6):
    model(torch.ones(1, 3)).sum().backward()
dist.destroy_process_group()
"""
CULPRIT, ELSEWHERE = "Rank 1 (pid ", "Ranks 1, 2 keep the others waiting, it seems"


@pytest.mark.parametrize("is_shared", [True, False], ids=["one folder", "a folder each"])
def test_a_stall_is_reported_on_both_hosts(is_shared: bool, tmp_path: Path) -> None:
    """Rank 1, on host 1, hangs in its forward; only ranks of a folder can see what others do."""
    homes = [tmp_path / ("both" if is_shared else f"host{number}") for number in range(2)]
    for home in homes:
        home.mkdir(exist_ok=True)
        (home / "train.py").write_text(STALLS)
    runs = [home / "run" for home in homes]
    logs = [runs[0] / "rank0.log", runs[1] / "rank1.log", runs[1] / "rank2.log"]
    words = f"{CULPRIT}|{ELSEWHERE}", *map(str, logs)
    with test_hosts(2) as hosts:
        started = [
            launch_on(hosts, number, 1 + number, homes[number], *words, PACELINE_STALL_AFTER="3")
            for number in range(2)
        ]
        done = [finish(each) for each in started]
    assert [each.returncode for each in done] == [0, 0], [each.stderr for each in done]
    reports = [
        "".join(path.read_text() for path in sorted(run.glob("stall-*.txt"))) for run in runs
    ]
    assert CULPRIT in reports[1], reports
    culprit = reports[1].split(CULPRIT, 1)[1].split("\n", 1)[0]
    assert " on host-1) keeps the others waiting: it has been in forward of Slow" in culprit
    assert (CULPRIT if is_shared else ELSEWHERE) in reports[0], reports
    first = CULPRIT if is_shared else ELSEWHERE
    for word, log in zip((first, CULPRIT, CULPRIT), logs, strict=True):
        assert word in log.read_text(), log
