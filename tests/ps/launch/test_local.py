"""``ps.local``: servers that end with their owner, whichever way it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline import ps
from paceline.errors import ConfigurationError, ServerStartError
from tests.ps.raw_client import RawClient
from tests.system import is_running, wait_gone

SOURCE = Path(__file__).parents[3] / "src"


def pids_of(addresses: list[str]) -> list[int]:
    found = []
    for address in addresses:
        with RawClient(address) as client:
            found.append(client.stats()["pid"])
    return found


def test_end_with_the_object(start_servers: Callable[..., ps.LocalServers]) -> None:
    servers = start_servers(3)
    pids = pids_of(servers.addresses)
    assert len(set(pids)) == 3
    directory = Path(servers.addresses[0].removeprefix("ipc://")).parent
    assert directory.stat().st_mode & 0o777 == 0o700
    servers.close()
    wait_gone(*pids)
    assert not directory.exists()
    servers.close()
    with pytest.raises(ServerStartError, match="have ended"):
        servers.restart(0)


OWNER = """
import sys
from paceline import ps
servers = ps.local(2)
print(*servers.addresses, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(None, marks=pytest.mark.slow)], ids=["killed", "ends"]
)
def test_end_with_the_process(how: signal.Signals | None) -> None:
    """Without a guard for the main module, without any set-up; killed, or without close()."""
    environ = {**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{SOURCE.parent}"}
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
    )
    assert owner.stdout is not None
    addresses = owner.stdout.readline().split()
    pids = pids_of(addresses)
    assert len(pids) == 2
    if how is not None:
        owner.send_signal(how)
    owner.communicate("")
    wait_gone(*pids)
    sockets = Path(addresses[0].removeprefix("ipc://")).parent
    until_s = time.monotonic() + 60
    while sockets.exists():
        assert time.monotonic() < until_s, "the directory of the sockets was left behind"
        time.sleep(0.05)


def test_kill_and_restart(start_servers: Callable[..., ps.LocalServers]) -> None:
    servers = start_servers(2)
    before = pids_of(servers.addresses)
    servers.kill(1)
    assert [is_running(pid) for pid in before] == [True, False]
    servers.restart(1)
    servers.restart(1)  # it runs: nothing to do
    after = pids_of(servers.addresses)
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_a_dead_server_comes_back(
    start_servers: Callable[..., ps.LocalServers], tmp_path: Path
) -> None:
    servers = start_servers(1, directory=tmp_path, restart=True)
    (pid,) = pids_of(servers.addresses)
    os.kill(pid, signal.SIGKILL)
    (after,) = pids_of(servers.addresses)
    assert after != pid


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"n": 0}, "1 to 4096"),
        ({"n": True}, "1 to 4096"),
        ({"restart": True}, "without a directory"),
        ({"start_method": "fork"}, "start_method"),
        ({"fsync": True}, "fsync without a directory"),
    ],
)
def test_wrong_arguments(
    arguments: dict[str, object], match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ConfigurationError, match=match):
        ps.local(**arguments)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir()), "it left its directory of sockets behind"


def test_a_directory_that_cannot_be(
    start_servers: Callable[..., ps.LocalServers], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ServerStartError, match=r"server 0 did not start: .*cannot be used"):
        start_servers(1, directory=tmp_path / "file")
