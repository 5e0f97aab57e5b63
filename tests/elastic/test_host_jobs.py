"""Elastic jobs on two hosts, each a network namespace with a launcher: links are cut, hosts go."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.scale import ask
from paceline.observe.run_folder import RunFolder
from paceline.testing.hosts import LINK, Hosts, hosts_unavailable_reason, test_hosts
from tests.cli.launched import environ, finish, start
from tests.elastic.jobs import SCRIPT, Ended, check

pytestmark = [
    pytest.mark.alone,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        hosts_unavailable_reason() is not None, reason=str(hosts_unavailable_reason())
    ),
]
test_hosts.__test__ = False  # type: ignore[attr-defined]

DEADLINE_S = 200.0
LEASE_S = 8


@dataclass
class HostJob:
    """A job on two hosts, one rank each unless said otherwise."""

    hosts: Hosts
    folder: Path
    plan: dict[str, Any]
    options: tuple[str, ...] = ()
    ranks: int = 1
    script: Path = SCRIPT

    def __post_init__(self) -> None:
        (self.folder / "out").mkdir()
        key = self.folder / "key"
        key.write_text("ab" * 32)
        key.chmod(0o600)
        self.launchers: dict[int, subprocess.Popen[str]] = {}
        self.starts = 0

    def start(self, number: int) -> None:
        """The launcher of a host, for the first time or again."""
        self.starts += 1
        env = environ(
            GLOO_SOCKET_IFNAME=LINK,
            PACELINE_HOST_ID=f"host-{number}",
            PACELINE_JOB_KEY_FILE=str(self.folder / "key"),
        )
        words = ["--elastic", "-n", str(self.ranks), "--nnodes", "2", "--node-rank", str(number)]
        words += ["--rdzv-endpoint", "10.77.0.1:29438", "--lease", str(LEASE_S), "--hold", "0"]
        words += ["--run-dir", f"run{self.starts}-{number}", *self.options, str(self.script), "out"]
        words.append(json.dumps(self.plan))
        self.launchers[number] = self.hosts._namespaces[number].call(
            lambda: start(*words, cwd=self.folder, env=env)
        )

    def set_link(self, number: int, state: str) -> None:
        self.hosts._namespaces[number].run("ip", "link", "set", LINK, state)

    def events(self) -> list[dict[str, Any]]:
        found = []
        for path in sorted(self.folder.glob("run*/membership.jsonl")):
            found += [json.loads(line) for line in path.read_text().splitlines()]
        return found

    def wait_for(self, is_so: Callable[[], bool], what: str) -> None:
        until_s = time.monotonic() + DEADLINE_S
        while not is_so():
            gone = [n for n, each in self.launchers.items() if each.poll() is not None]
            if gone or time.monotonic() > until_s:
                self.close()
                pytest.fail(f"{gone} ended, or {DEADLINE_S} s are over: {what}\n{self.said()}")
            time.sleep(0.05)

    def wait_worlds(self, *worlds: int) -> None:
        """Until epochs have had these numbers of ranks, the last of them at present."""
        self.wait_for(lambda: _has_run(self.events(), worlds), f"worlds {worlds}")

    def said(self) -> str:
        logs = [*self.folder.glob("**/*.log"), *self.folder.glob("run*/failure.txt")]
        texts = [f"--- {path}\n{path.read_text()[-2000:]}" for path in logs]
        return f"{self.events()}\n" + "\n".join(texts)

    def finish(self) -> list[subprocess.CompletedProcess[str]]:
        return [finish(self.launchers[number]) for number in sorted(self.launchers)]

    def ended(self, code: int) -> Ended:
        return Ended(code, self.folder / "out", RunFolder(self.folder / "run1-0"))

    def close(self) -> None:
        for number, launcher in self.launchers.items():
            if launcher.poll() is None:
                launcher.kill()
            if launcher.stderr is not None and not launcher.stderr.closed:
                (self.folder / f"launcher{number}.log").write_text(launcher.communicate()[1])


def _has_run(events: list[dict[str, Any]], worlds: tuple[int, ...]) -> bool:
    found = iter(event["world"] for event in events)
    return all(world in found for world in worlds) and events[-1]["world"] == worlds[-1]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with test_hosts(2) as found:
        yield found


def stop_training(job: HostJob) -> None:
    """Let the script end soon, at a step that all ranks read of before they come to it."""
    out = job.folder / "out"
    steps = [json.loads(path.read_text().splitlines()[-1])[0] for path in out.glob("digests-*")]
    draft = out / "enough.new"
    draft.write_text(str(max(steps) + 60))
    draft.replace(out / "enough")


def test_a_cut_link_and_a_coordinator_that_dies(hosts: Hosts, tmp_path: Path) -> None:
    """The host is dropped, its ranks have stopped before, it rejoins; then the coordinator dies."""
    job = HostJob(hosts, tmp_path, {"steps": 100_000, "pause_s": 0.05}, ranks=2)
    try:
        job.start(0)
        job.start(1)
        job.wait_worlds(4)
        job.set_link(1, "down")
        job.wait_worlds(4, 2)
        assert not ranks_below(job.launchers[1].pid), "two parts go on"
        assert "host 1 was not heard from" in job.events()[-1]["why"]
        job.set_link(1, "up")
        job.wait_worlds(4, 2, 4)
        kill_coordinator(job)
        ask(RunFolder(tmp_path / "run1-0"), 3)
        job.wait_worlds(4, 2, 4, 3)
        stop_training(job)
        done = job.finish()
    finally:
        job.close()
    assert [each.returncode for each in done] == [0, 0], job.said() + done[0].stderr[-3000:]
    results = job.ended(0).results()
    assert len(results) == 3
    for part in results[0]["digests"]:
        assert len({each["digests"][part] for each in results}) == 1, part


def ranks_below(launcher: int) -> list[str]:
    """Ranks that a launcher has, as their processes are called."""
    text = subprocess.run(["ps", "-eo", "pid,ppid,comm"], capture_output=True, text=True).stdout
    rows = [line.split(None, 2) for line in text.splitlines()[1:]]
    below = {str(launcher)}
    for _ in range(3):
        below |= {pid for pid, parent, _ in rows if parent in below}
    return [name for pid, _, name in rows if pid in below and name.startswith("rank")]


def kill_coordinator(job: HostJob) -> None:
    """The process that listens at the job's port."""
    text = job.hosts._namespaces[0].call(
        lambda: (
            Path("/proc/thread-self/net/tcp6").read_text()
            + Path("/proc/thread-self/net/tcp").read_text()
        )
    )
    inode = next(
        line.split()[9]
        for line in text.splitlines()
        if line.split()[1].endswith(f":{29438:04X}") and line.split()[3] == "0A"
    )
    for path in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(path) == f"socket:[{inode}]":
                os.kill(int(path.parts[2]), signal.SIGKILL)
                return
        except OSError:
            continue
    pytest.fail("there is no coordinator")


def test_launchers_are_told_to_end_and_killed(hosts: Hosts, tmp_path: Path) -> None:
    """SIGTERM: a host hands over. SIGKILL of the first: the others wait for it, and go on."""
    job = HostJob(hosts, tmp_path, {"steps": 100_000, "pause_s": 0.05})
    try:
        job.start(0)
        job.start(1)
        job.wait_worlds(2)
        job.launchers[1].send_signal(signal.SIGTERM)
        job.wait_worlds(2, 1)
        told = finish(job.launchers[1])
        assert told.returncode == 128 + signal.SIGTERM, told.stderr
        assert "ranks are to join or to leave" in job.events()[-1]["why"]
        job.start(1)
        job.wait_worlds(2, 1, 2)
        job.launchers[0].kill()
        finish(job.launchers[0])
        epochs = job.events()[-1]["epoch"]
        job.start(0)
        job.wait_for(
            lambda: job.events()[-1]["epoch"] > epochs and job.events()[-1]["world"] == 2,
            "the first host is back",
        )
        stop_training(job)
        done = job.finish()
    finally:
        job.close()
    assert [each.returncode for each in done] == [0, 0], job.said()
    results = job.ended(0).results()
    assert len({json.dumps(each["digests"]) for each in results}) == 1


def test_two_hosts_train_all_samples(hosts: Hosts, tmp_path: Path) -> None:
    """Nothing fails but a rank of the second host."""
    plan = {"steps": 20, "faults": [["kill", "bucket", 5, 2]]}
    job = HostJob(hosts, tmp_path, plan, ("--hold", "100"), ranks=2)
    try:
        job.start(0)
        job.start(1)
        done = job.finish()
    finally:
        job.close()
    assert [each.returncode for each in done] == [0, 0], job.said()
    check(job.ended(0), faults=1, world=4)
    assert "on host 1 (pid" in job.events()[-1]["why"]
    assert "ab" * 32 not in "".join(each.stderr + each.stdout for each in done)
