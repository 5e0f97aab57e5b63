"""How a fork server ends, and what it says if it cannot fork."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from paceline.launch.child import ForkServerError
from paceline.launch.fork_server import ForkServer
from paceline.launch.kernel import orphans_ended
from paceline.launch.wire import EndPolicy
from tests.system import is_running, wait_gone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
LEISURELY = EndPolicy(first=signal.SIGTERM, grace_s=600.0)


def leave_one_behind(pipe: Connection, path: str, ignores: bool) -> None:
    """A process of the session that tells of SIGTERM, or does not care."""

    def on_sigterm(*_: object) -> None:
        Path(path).touch()
        if not ignores:
            os._exit(0)

    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, on_sigterm)
        os.setpgid(0, 0)  # as a shell does with its jobs
        os.write(told, b"x")
        while True:
            time.sleep(600)
    os.read(ready, 1)
    pipe.send(pid)


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner that waits longer than any test."""
    monkeypatch.setattr("paceline.launch.fork_server._END_S", 3600.0)


@pytest.mark.usefixtures("_patient")
def test_one_that_still_imports_is_killed_at_once() -> None:
    """It hears no signal meanwhile, and has no child."""
    with ForkServer(["tests.launch.slow_import"], path=sys.path) as server:
        child = server.fork()
    assert not is_running(server.pid)
    with pytest.raises(ForkServerError):
        assert child.pid
    child.close()


def test_what_is_left_gets_sigterm(tmp_path: Path) -> None:
    """Of a rank that has ended itself: as of one that has not."""
    with ForkServer([], path=sys.path) as server:
        child = server.fork(LEISURELY)
        child.run(leave_one_behind, str(tmp_path / "told"), False)
        left = child.pipe.recv()
        assert child.wait(60) == 0
        child.close()
        wait_gone(left)
    assert (tmp_path / "told").exists()


@pytest.mark.usefixtures("_patient")
def test_an_owner_in_a_hurry(tmp_path: Path) -> None:
    """It does not wait for what does not care for SIGTERM."""
    asked = []
    with orphans_ended(), ForkServer([], path=sys.path) as server:
        child = server.fork(LEISURELY)
        child.run(leave_one_behind, str(tmp_path / "told"), True)
        left = child.pipe.recv()
        assert child.wait(60) == 0
        child.close()
        server.close(lambda: asked.append(0) or (tmp_path / "told").exists())  # type: ignore[func-returns-value]
    assert asked
    wait_gone(left)


def test_the_system_refuses_a_process() -> None:
    with ForkServer(["tests.launch.no_forks"], path=sys.path) as server:
        for _ in range(2):  # the server lives on
            with contextlib.closing(server.fork()) as child:
                for _ in range(2):
                    with pytest.raises(ForkServerError, match="refuses another process: Resource"):
                        assert child.pid
        with (
            contextlib.closing(server.fork(may_fork=True)) as child,
            pytest.raises(ForkServerError, match=r"ulimit -u.*pids\.max"),
        ):
            assert child.pid
        assert server.is_alive()
