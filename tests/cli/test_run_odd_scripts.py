"""Scripts that do what launchers do not expect: crash, print for nobody, leave somebody behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.launched import DEADLINE_S, environ, launch, running, until

CRASHES = """
import ctypes
def read_nothing():
    ctypes.string_at(0)
def main():
    read_nothing()
main()
"""


@pytest.mark.slow
def test_a_crash_names_the_line(tmp_path: Path) -> None:
    """Native code of the script's own, or of a library: there is no exception to show."""
    (tmp_path / "crashes.py").write_text(CRASHES)
    done = launch("crashes.py", cwd=tmp_path)
    assert done.returncode == 128 + signal.SIGSEGV
    assert f"killed by SIGSEGV: at {tmp_path}/crashes.py:4, in read_nothing\n" in done.stderr


PRINTS = """
import os, time
os.set_blocking(1, False)
try:
    while True: os.write(1, b"x" * 1000 + b"\\n")
except BlockingIOError:
    open("full", "w")
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
def test_nobody_reads_what_is_printed(number: signal.Signals, tmp_path: Path) -> None:
    """All pipes are full, and the launcher waits for a reader; still it ends when it is told to."""
    (tmp_path / "prints.py").write_text(PRINTS)
    with running("prints.py", cwd=tmp_path) as launcher:
        until((tmp_path / "full").exists, "the pipes are not full")
        launcher.send_signal(number)
        assert launcher.wait(DEADLINE_S) == 128 + number


LEAVES = r"""
import os, sys, time
sys.stdout.buffer.write(bytes(range(256)) * 300)
sys.stdout.flush()
if os.fork() == 0:
    os.setsid()
    while True: os.write(1, b"y\n" * 500)
print("\x1b[31mred", flush=True)
os.close(1)
if sys.argv[1] == "fails": raise ValueError("no such label")
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ends", "fails"])
def test_binary_output_and_a_daemon_that_prints(how: str, tmp_path: Path) -> None:
    """What is left behind writes to the rank's stdout for ever."""
    (tmp_path / "leaves.py").write_text(LEAVES)
    words = [sys.executable, "-m", "paceline", "run", "-n", "2", "leaves.py", how]
    done = subprocess.run(words, cwd=tmp_path, env=environ(), capture_output=True, timeout=240)
    assert done.returncode == (how == "fails"), done.stderr
    (log,) = tmp_path.glob("paceline-runs/*/rank1.log")
    assert bytes(range(256)) in log.read_bytes()
    if how == "fails":
        assert b"failed first: ValueError: no such label" in done.stderr
        assert b"\x1b" not in done.stderr


INNER = """
import torch, torch.distributed as dist
from paceline import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
for step in range(3):
    model(torch.ones(2, 4)).sum().backward()
print("rank", dist.get_rank(), "of", dist.get_world_size())
dist.destroy_process_group()
"""
OUTER = """
import os, subprocess, sys
if os.environ["RANK"] == "1":
    words = ["-m", "paceline", "run", "-n", "2", "--run-dir", "inner", "inner.py"]
    sys.exit(subprocess.run([sys.executable, *words]).returncode)
"""


@pytest.mark.slow
def test_a_job_inside_of_a_job(tmp_path: Path) -> None:
    (tmp_path / "inner.py").write_text(INNER)
    (tmp_path / "outer.py").write_text(OUTER)
    done = launch("-n", "2", "--run-dir", "outer", "outer.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert lines == ["[1] [1] rank 1 of 2", "[1] rank 0 of 2"]
    for name, count in (("inner", 2), ("outer", 0)):
        assert len(list((tmp_path / name).glob("*.events"))) == count


@pytest.mark.slow
def test_too_few_descriptors(tmp_path: Path) -> None:
    """40 ranks with 70 descriptors; the limit may be raised, or not."""
    (tmp_path / "train.py").write_text("import resource; print('trained')")
    words = f"exec {sys.executable} -m paceline run -n 40 train.py"
    for limits, status in (("ulimit -Sn 110", 0), ("ulimit -n 110", 2), ("ulimit -n 70", 2)):
        done = subprocess.run(
            ["/bin/sh", "-c", f"{limits}; {words}"],
            cwd=tmp_path,
            env=environ(),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.returncode == status, done.stderr
        if status:
            assert done.stderr.startswith("paceline run: 40 ranks need ")
            assert len(done.stderr.splitlines()) == 1
        else:
            assert done.stdout.count("trained") == 40
    assert os.path.isdir(tmp_path / "paceline-runs")
