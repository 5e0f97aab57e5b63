"""The process that torch's tests are forked from: torch and its tests loaded, the class swapped.

`python -m …conformance.server CLASS` reads one JSON request a line on standard input and writes one
JSON outcome a line on standard output; `client.py` is the other end. It ends at an interrupt, or
when its input does.

Every test runs in a process group of its own. When the test is over, or its time is, or this
process is interrupted, the whole group is killed: no rank is left behind.
"""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from . import swap
from .case import run_case
from .gates import import_distributed_test
from .outcome import FAILED, Outcome, Request

# How long torch has to report a hang by itself before the group is killed.
GRACE_S = 15.0
POLL_S = 0.02
LOG_LINES = 200
# What torch's logger puts before each line of a traceback; only the rank is worth reading.
LOG_PREFIX = re.compile(r"^(\[rank\d+\]:)?[EIWV]\d{4} [^\]]*\]", re.MULTILINE)


def main(choice: str) -> None:
    """Answer requests until the input ends."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # a print in a test must not end up among the replies
    distributed_test = import_distributed_test()
    swap.swap_in(choice)
    gc.collect()
    gc.freeze()  # forked tests neither walk nor copy what is loaded by now
    replies.write("ready\n")
    for line in sys.stdin:
        outcome = serve(distributed_test, Request(**json.loads(line)))
        replies.write(json.dumps(asdict(outcome)) + "\n")


def serve(distributed_test: ModuleType, request: Request) -> Outcome:
    """Run the requested test in a forked process group and return its outcome."""
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        pid = os.fork()
        if pid == 0:
            _run_and_exit(distributed_test, request, Path(folder))
        _wait_and_kill(pid, request.deadline_s + GRACE_S)
        return _read_outcome(Path(folder))


def _run_and_exit(distributed_test: ModuleType, request: Request, folder: Path) -> NoReturn:
    try:
        _lead_group(0)
        _redirect_output(folder / "log")
        swap.set_defaults(**request.defaults)
        swap.record_to(folder / "wrappers")
        outcome = run_case(distributed_test, request)
        (folder / "outcome").write_text(json.dumps(asdict(outcome)))
    finally:
        os._exit(0)  # without the clean-up that belongs to the process this one was forked from


def _redirect_output(log: Path) -> None:
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _wait_and_kill(pid: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    try:
        _lead_group(pid)  # both processes do this: the group must exist whichever comes first
        while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
            time.sleep(POLL_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _lead_group(pid: int) -> None:
    with suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)


def _read_outcome(folder: Path) -> Outcome:
    log = folder / "log"
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = LOG_PREFIX.sub(r"\1", text).splitlines()
    output = "\n".join(["--- output ---", *lines[-LOG_LINES:]])
    if not (folder / "outcome").exists():
        return Outcome(FAILED, f"killed at the deadline, or died without an outcome\n{output}")
    outcome = Outcome(**json.loads((folder / "outcome").read_text()))
    detail = f"{outcome.detail}\n{output}" if outcome.detail else ""
    wrappers = folder / "wrappers"
    made = wrappers.read_text().splitlines() if wrappers.exists() else []
    return Outcome(outcome.status, detail, made)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main(sys.argv[1])
