"""An elastic job on two hosts with shards: ranks die, hosts have uneven numbers of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli.scale import ask
from paceline.observe.run_folder import RunFolder
from paceline.testing.hosts import hosts_unavailable_reason, test_hosts
from tests.elastic.test_host_jobs import HostJob
from tests.shards.test_elastic import undisturbed

pytestmark = [
    pytest.mark.alone,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        hosts_unavailable_reason() is not None, reason=str(hosts_unavailable_reason())
    ),
]
test_hosts.__test__ = False  # type: ignore[attr-defined]
NAME, STEPS = "cnn with dropout", 200
SCRIPT = Path(__file__).parent / "elastic_script.py"


def test_kills_and_a_resize(tmp_path: Path) -> None:
    """Two ranks on each host; one of each is killed; then two and one."""
    faults = [("shard", 5, 3), ("between", 15, 0)]
    plan = {"steps": STEPS, "pause_s": 0.1, "faults": faults, "case": NAME}
    with test_hosts(2) as hosts:
        job = HostJob(hosts, tmp_path, plan, ranks=2, script=SCRIPT)
        fired = [job.folder / "out" / f"fired-{number}" for number in range(2)]
        try:
            job.start(0)
            job.start(1)
            job.wait_worlds(4)
            job.wait_for(lambda: all(map(Path.exists, fired)), "two ranks die")
            job.wait_worlds(4, 3, 4)
            ask(RunFolder(tmp_path / "run1-0"), 3)
            job.wait_worlds(4, 3, 4, 3)
            (job.folder / "out" / "hurry").touch()
            done = job.finish()
        finally:
            job.close()
    assert [each.returncode for each in done] == [0, 0], job.said() + done[0].stderr[-3000:]
    results = job.ended(0).results()
    assert {each["digest"] for each in results} == {undisturbed(STEPS, NAME)}
    assert {each["world"] for each in results} == {3}
