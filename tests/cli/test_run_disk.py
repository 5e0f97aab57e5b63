"""A disk that is full, for real: a small tmpfs. It costs records and lines, not the training."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.launched import launch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small tmpfs"),
]
MIB = 1 << 20
TRAINS = """
import torch, torch.distributed as dist
from paceline import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
for step in range(40):
    print("x" * 200_000)
    model(torch.ones(2, 4)).sum().backward()
print("trained", step + 1, "steps")
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """12 MiB: the records of one rank, and 4 MiB for logs."""
    disk = tmp_path / "disk"
    disk.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={12 * MIB}", "tmpfs", str(disk)]
    if subprocess.run(words, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_training_goes_on(small_disk: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    folder = small_disk / "run"
    done = launch("-n", "2", "--tee", "0", "--run-dir", str(folder), "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("trained 40 steps\n")
    assert "is incomplete: No space left on device" in done.stderr
    logs = [(folder / f"rank{rank}.log").read_text() for rank in range(2)]
    no_room = "records nothing: its file in the run folder"
    assert any(no_room in text for text in (done.stderr, *logs))
    # None if both ask at the same moment: each has then taken what the other lacks.
    assert len(list(folder.glob("rank*.events"))) <= 1


def test_no_room_at_all(small_disk: Path, tmp_path: Path) -> None:
    """Nothing has begun yet, so it is an error; no draft is left behind."""
    (tmp_path / "train.py").write_text("print('trained')")
    with (small_disk / "fill").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(MIB // 16)):
            pass
    done = launch("--run-dir", str(small_disk / "run"), "train.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "No space left on device; choose another place with --run-dir" in done.stderr
    assert not list((small_disk / "run").iterdir())
