"""Ctrl-C ends all that ``paceline run`` has started within 5 s, a second one at once.

With default options, and with processes that ignore what can be ignored. These tests judge time.
"""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli.launched import finish, running, until, wait_started
from tests.system import is_running

pytestmark = pytest.mark.alone

FIRST_S, SECOND_S = 5.0, 1.0
WAITS = """
import os, signal, sys, time
if "stubborn" in sys.argv:
    for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)
def beget(change):
    pid = os.fork()
    if pid == 0:
        for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)
        change()
        while True: time.sleep(600)
    return pid
# In the rank's group, in a group of its own, in a session of its own.
pids = [os.getpid(), *map(beget, (lambda: None, lambda: os.setpgid(0, 0), os.setsid))]
me = os.environ["RANK"]
open(me + ".new", "w").write(" ".join(map(str, pids)))
os.rename(me + ".new", me + ".pids")
if "ends" not in sys.argv: time.sleep(600)
"""


def fork_server(launcher: subprocess.Popen[str]) -> int:
    """Its process, once it is in the middle of importing torch."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")

    def imports() -> bool:
        pids = children.read_text().split()
        return bool(pids) and "libtorch" in Path(f"/proc/{pids[0]}/maps").read_text()

    until(imports, "no import")
    return int(children.read_text().split()[0])


def seconds_to_end(launcher: subprocess.Popen[str], pids: list[int], *, twice: bool) -> float:
    """From the last Ctrl-C until nothing runs any more."""
    launcher.send_signal(signal.SIGINT)
    if twice:
        assert launcher.stderr is not None
        while "once more to kill" not in launcher.stderr.readline():
            assert launcher.poll() is None
        launcher.send_signal(signal.SIGINT)
    began_s = time.monotonic()
    done = finish(launcher)
    until(lambda: not any(map(is_running, pids)), "a process lives on")
    assert done.returncode == 130, done.stderr
    return time.monotonic() - began_s


@pytest.mark.parametrize("how", ["polite", "stubborn"])
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
def test_while_ranks_run(how: str, twice: bool, tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    with running("-n", "2", "waits.py", how, cwd=tmp_path) as launcher:
        pids = wait_started(tmp_path, launcher)
        took_s = seconds_to_end(launcher, pids, twice=twice)
    assert took_s < (SECOND_S if twice else FIRST_S)


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
def test_while_the_fork_server_imports(twice: bool, tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    with running("-n", "2", "waits.py", cwd=tmp_path) as launcher:
        pids = [fork_server(launcher)]
        if twice:
            launcher.send_signal(signal.SIGINT)  # nobody waits for what it says
        took_s = seconds_to_end(launcher, pids, twice=False)
    assert took_s < SECOND_S


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
def test_while_the_launcher_ends_what_is_left(twice: bool, tmp_path: Path) -> None:
    """All ranks have ended, and have left behind what does not care for SIGTERM."""
    (tmp_path / "waits.py").write_text(WAITS)
    with running("-n", "2", "waits.py", "ends", cwd=tmp_path) as launcher:
        pids = wait_started(tmp_path, launcher)
        until(lambda: not is_running(pids[0]) and not is_running(pids[4]), "a rank lives on")
        began_s = time.monotonic()
        launcher.send_signal(signal.SIGINT)
        if twice:
            time.sleep(0.1)  # two that come together are one
            launcher.send_signal(signal.SIGINT)
        finish(launcher)
        until(lambda: not any(map(is_running, pids)), "a process lives on")
    assert time.monotonic() - began_s < (SECOND_S if twice else FIRST_S)
