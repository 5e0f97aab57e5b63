"""Folders that this user may not write into: a clear message, and training goes on.

Root may write everywhere, so as root the programs run without that right.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.launched import DEADLINE_S, environ

NO_RIGHTS = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() == 0 and not shutil.which("setpriv"), reason="as root it needs setpriv"
    ),
]
TRAINS = """
import torch, torch.distributed as dist
from paceline import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
for step in range(4):
    model(torch.ones(2, 4)).sum().backward()
if dist.get_rank() == 0:
    print("trained", step + 1, "steps")
dist.destroy_process_group()
"""


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """A folder with a script; its user may read it and enter it."""
    folder = tmp_path / "closed"
    folder.mkdir()
    (folder / "train.py").write_text(TRAINS)
    folder.chmod(0o500)
    yield folder
    folder.chmod(0o700)


def python(*words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    rights = NO_RIGHTS if os.geteuid() == 0 else []
    found = subprocess.run(
        [*rights, sys.executable, *words],
        cwd=cwd,
        env=environ(**variables),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert sorted(each.name for each in cwd.iterdir()) == ["train.py"]
    return found


def test_logs_go_elsewhere(closed: Path, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    words = ["-m", "paceline", "run", "-n", "2", "train.py"]
    done = python(*words, cwd=closed, TMPDIR=str(tmp_path / "tmp"))
    assert (done.returncode, done.stdout) == (0, "trained 4 steps\n"), done.stderr
    (made,) = (tmp_path / "tmp").glob("paceline-run-*")
    (line,) = done.stderr.splitlines()
    assert "cannot be made: Permission denied; choose another place with --run-dir" in line
    assert line.endswith(f"Logs are in {made}")
    assert sorted(path.name for path in made.glob("*.events")) == ["rank0.events", "rank1.events"]


def test_a_folder_that_was_named_is_an_error(closed: Path) -> None:
    done = python("-m", "paceline", "run", "--run-dir", "here", "train.py", cwd=closed)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "paceline run: the run folder here cannot be made: Permission denied; choose another place "
        "with --run-dir\n"
    )


@pytest.mark.parametrize("name", ["", "deeper"])
def test_without_a_launcher_training_goes_on(name: str, closed: Path) -> None:
    alone = {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    done = python("train.py", cwd=closed, PACELINE_RUN_DIR=str(closed / name), **alone)
    assert (done.returncode, done.stdout) == (0, "trained 4 steps\n"), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("rank 0 records nothing: its file in the run folder ")
    assert "cannot be made: Permission denied. Training goes on. Set PACELINE_RUN_DIR" in line
