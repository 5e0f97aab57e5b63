"""Scripts in the shapes of torch's tutorials, unchanged: under torchrun and under ``paceline run``.

They know torch only. test_run_scripts.py has one more: sampler, loader, checkpoint and barrier.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.launched import DEADLINE_S, environ

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPTS = Path(__file__).with_name("tutorials")
LAUNCHERS = {
    "torchrun": ("torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    "run": ("paceline", "run", "-n", "2"),
    "patched": ("paceline", "run", "-n", "2", "--patch"),
}
RESULT = re.compile(r"result (\S+) (\S+)")


def launched(launcher: str, folder: Path, script: str, *words: str) -> str:
    """Run a script to its end; return what it printed."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", *LAUNCHERS[launcher], str(SCRIPTS / script), *words]
    env = environ(OMP_NUM_THREADS="1")
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def result_of(output: str, launcher: str) -> str:
    """The number that both ranks have found, with the class that they should have."""
    found = RESULT.findall(output)
    assert len(found) == 2, output
    (result,) = {number for number, _ in found}
    expected = "paceline.ddp.wrapper" if launcher == "patched" else "torch.nn.parallel.distributed"
    assert {module for _, module in found} == {expected}
    return result


@pytest.mark.parametrize("script", ["recorded.py", "model_parallel.py"])
def test_the_same_numbers(script: str, tmp_path: Path) -> None:
    results = {each: result_of(launched(each, tmp_path, script), each) for each in LAUNCHERS}
    assert len(set(results.values())) == 1, results


def test_resume_from_a_snapshot(tmp_path: Path) -> None:
    """Two epochs, and two more in a second job."""
    results = {}
    for each in LAUNCHERS:
        folder = tmp_path / each
        first = launched(each, folder, "snapshot.py", "2", "1")
        assert "resuming" not in first
        again = launched(each, folder, "snapshot.py", "4", "1")
        assert again.count("resuming from the snapshot") == 2
        assert [f"epoch {epoch}," in again for epoch in range(4)] == [False, False, True, True]
        results[each] = (result_of(first, each), result_of(again, each))
    assert len(set(results.values())) == 1, results
