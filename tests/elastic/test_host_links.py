"""A host is cut off while ranks wait in a hook or a barrier; its launcher is stopped."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.testing.hosts import Hosts, hosts_unavailable_reason, test_hosts
from tests.elastic.test_host_jobs import HostJob, ranks_below, stop_training

pytestmark = [
    pytest.mark.alone,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        hosts_unavailable_reason() is not None, reason=str(hosts_unavailable_reason())
    ),
]
test_hosts.__test__ = False  # type: ignore[attr-defined]

POINTS = ("hook", "barrier", "commit")


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with test_hosts(2) as found:
        yield found


def test_in_a_hook_in_a_barrier_and_a_stopped_launcher(hosts: Hosts, tmp_path: Path) -> None:
    """Rank 1, on the second host, waits at each point until its link is cut; then it goes on there.

    Rank 0 waits for it meanwhile, in the hook's collective, in the barrier, in the next backward.
    """
    faults = [["wait", point, 0, 1] for point in POINTS]
    plan = {"steps": 100_000, "pause_s": 0.05, "own_hook": True, "faults": faults}
    job, worlds = HostJob(hosts, tmp_path, plan), [2]
    out = tmp_path / "out"
    try:
        job.start(0)
        job.start(1)
        job.wait_worlds(*worlds)
        for number, point in enumerate(POINTS):
            (out / f"armed-{number}").touch()
            job.wait_for((out / f"fired-{number}").exists, f"rank 1 comes to {point}")
            if point == "commit":
                job.launchers[1].send_signal(signal.SIGSTOP)
            else:
                job.set_link(1, "down")
            (out / f"acted-{number}").touch()
            worlds.append(1)
            job.wait_worlds(*worlds)
            assert not ranks_below(job.launchers[1].pid), "two parts go on"
            if point == "commit":
                job.launchers[1].send_signal(signal.SIGCONT)
            else:
                job.set_link(1, "up")
            worlds.append(2)
            job.wait_worlds(*worlds)
        stop_training(job)
        done = job.finish()
    finally:
        job.close()
    assert [each.returncode for each in done] == [0, 0], job.said() + done[0].stderr[-3000:]
    results = job.ended(0).results()
    assert len({json.dumps(each["digests"]) for each in results}) == 1
