"""A host is cut off at every point of a step, in construction and in recovery; one is stopped."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from functools import partial
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

# "commit" comes twice: the second time the launcher is stopped.
POINTS = ("forward", "bucket", "hook", "between", "optimizer", "commit", "barrier", "commit")
LEASE = ("--lease", "4")  # each cut costs one


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with test_hosts(2) as found:
        yield found


def cut_at(job: HostJob, number: int, point: str) -> None:
    """The second host is on its way: whoever waits there is fenced, and the host comes again."""
    out = job.folder / "out"
    job.wait_for((out / f"fired-{number}").exists, f"the second host comes to {point}")
    fence_second_host(job, lambda: job.set_link(1, "down"), out / f"acted-{number}")
    job.set_link(1, "up")


def have_trained(out: Path, members: int) -> bool:
    """Whether so many have committed a step."""
    return len(list(out.glob("digests-*"))) >= members


def fence_second_host(job: HostJob, cut: Callable[[], None], acted: Path) -> None:
    """Cut it off; its rank goes on from where it waits, and ends within the lease."""
    cut()
    acted.touch()
    job.wait_for(lambda: not ranks_below(job.launchers[1].pid), "its ranks end")


def test_at_all_points_and_a_stopped_launcher(hosts: Hosts, tmp_path: Path) -> None:
    """Rank 1, on the second host, waits at each point until its link is cut; then it goes on there.

    Rank 0 waits for it meanwhile, in the hook's collective, in the barrier, in the next backward.
    """
    faults = [["wait", point, 0, "host-1"] for point in ("construction", "recovery")]
    faults += [["wait", point, 0, 1] for point in POINTS]
    plan = {"steps": 100_000, "pause_s": 0.05, "own_hook": True, "faults": faults}
    job, worlds = HostJob(hosts, tmp_path, plan, LEASE), [2]
    out = tmp_path / "out"
    (out / "armed-0").touch()
    try:
        job.start(0)
        job.start(1)
        cut_at(job, 0, "construction")
        job.wait_worlds(*worlds)
        for number, point in enumerate(POINTS, 2):
            is_last = number == len(POINTS) + 1
            (out / f"armed-{number}").touch()
            job.wait_for((out / f"fired-{number}").exists, f"rank 1 comes to {point}")
            if is_last:
                job.launchers[1].send_signal(signal.SIGSTOP)
            else:
                job.set_link(1, "down")
            (out / f"acted-{number}").touch()
            worlds.append(1)
            job.wait_worlds(*worlds)
            assert not ranks_below(job.launchers[1].pid), "two parts go on"
            trained = len(list(out.glob("digests-*")))
            if is_last:
                job.launchers[1].send_signal(signal.SIGCONT)
            else:
                job.set_link(1, "up")
            if number == 2:  # it joins, and so recovers
                (out / "armed-1").touch()
                cut_at(job, 1, "recovery")
            worlds.append(2)
            job.wait_worlds(*worlds)
            # Who dies again and again without a step in between is not started any more.
            more = partial(have_trained, out, trained + 1)
            job.wait_for(more, "the new rank commits a step")
        stop_training(job)
        done = job.finish()
    finally:
        job.close()
    assert [each.returncode for each in done] == [0, 0], job.said() + done[0].stderr[-3000:]
    results = job.ended(0).results()
    assert len({json.dumps(each["digests"]) for each in results}) == 1
