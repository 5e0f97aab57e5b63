"""``paceline run`` in a process of its own, for tests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEADLINE_S = 240.0
"""Only ends a hang: a launcher imports torch, on a machine that does other things as well."""


def environ(**more: str) -> dict[str, str]:
    """As a user has it: nothing of the test's own ranks or settings."""
    found = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return {**found, "PYTHONPATH": str(ROOT / "src"), **more}


def start(*words: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Start ``paceline run`` with these words, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "paceline", "run", *words],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ() if env is None else env,
        start_new_session=True,
    )


def finish(launcher: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """Wait for its end."""
    try:
        out, err = launcher.communicate(timeout=DEADLINE_S)
    finally:
        launcher.kill()
        launcher.wait()
    return subprocess.CompletedProcess(launcher.args, launcher.returncode, out, err)


def launch(
    *words: str, cwd: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run it to the end."""
    return finish(start(*words, cwd=cwd, env=env))


@contextlib.contextmanager
def running(*words: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """One that is interrupted inside of the block."""
    with start(*words, cwd=cwd) as launcher:
        try:
            yield launcher
        finally:
            if launcher.poll() is None:
                launcher.send_signal(signal.SIGKILL)


def until(is_met: Callable[[], bool], what: str) -> None:
    """Wait for an event."""
    until_s = time.monotonic() + DEADLINE_S
    while not is_met():
        assert time.monotonic() < until_s, what
        time.sleep(0.02)


def wait_started(folder: Path, launcher: subprocess.Popen[str]) -> list[int]:
    """The processes that its two ranks have named in ``0.pids`` and ``1.pids``."""
    files = [folder / f"{rank}.pids" for rank in range(2)]
    until(lambda: launcher.poll() is not None or all(f.exists() for f in files), "no start")
    assert launcher.poll() is None, launcher.communicate()
    return [int(word) for file in files for word in file.read_text().split()]
