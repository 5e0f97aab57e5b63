"""How each contender of ``paceline bench elastic`` is started, and started again.

A contender is a launcher with its ranks. torchft has no launcher of its own: a process of ours
starts its lighthouse and its replicas, and a replica that died at once again.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.launch.kernel import descendants

SCRIPT = Path(__file__).parent / "script.py"
OURS, OURS_SPARE, TORCHRUN, TORCHFT = "paceline", "paceline, a spare", "torchrun", "torchft"
CONTENDERS = (OURS_SPARE, OURS, TORCHRUN, TORCHFT)
_END_S = 20.0


def why_not(contender: str) -> str:
    """Why a contender cannot run here; '' if it can."""
    missing = contender == TORCHFT and importlib.util.find_spec("torchft") is None
    return "torchft is not installed: pip install torchft" if missing else ""


def command(contender: str, ranks: int, folder: Path) -> list[str]:
    """The command line that starts it."""
    script = [str(SCRIPT), contender.split(",")[0], str(folder / "notes")]
    if contender == TORCHRUN:
        options = ["--nproc-per-node", str(ranks), "--standalone", "--max-restarts", "10000"]
        return [sys.executable, "-m", "torch.distributed.run", *options, *script]
    if contender == TORCHFT:
        module = "paceline.cli.bench.elastic.torchft_launcher"
        return [sys.executable, "-m", module, str(ranks), *script]
    options = ["--elastic", "-n", str(ranks), "--tee", "0", "--run-dir", str(folder / "run")]
    options += ["--spares", "1"] if contender == OURS_SPARE else []
    return [sys.executable, "-m", "paceline", "run", *options, *script]


@contextlib.contextmanager
def started(contender: str, ranks: int, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run it, with its output in a file; end all of its processes at the end."""
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    with (folder / "output.txt").open("w") as output:
        launcher = subprocess.Popen(
            command(contender, ranks, folder), stdout=output, stderr=output, env=environ
        )
    try:
        yield launcher
    finally:
        _end(launcher)


def _end(launcher: subprocess.Popen[bytes]) -> None:
    below = descendants(launcher.pid)
    launcher.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        launcher.wait(_END_S)
    for pid in below & descendants(launcher.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if launcher.poll() is None:
        launcher.kill()
        launcher.wait()
    until_s = time.monotonic() + _END_S
    while any(_is_ours(pid, launcher.pid) for pid in below) and time.monotonic() < until_s:
        time.sleep(0.05)


def _is_ours(pid: int, launcher: int) -> bool:
    return pid in descendants(launcher)
