"""Who may enter: keys, what is refused, and that nothing secret is shown."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import zmq

from paceline.errors import ConfigurationError
from paceline.ps.protocol.keys import ClientKeys, make_keys, read_client_keys, read_server_keys
from paceline.ps.protocol.settings import ServerSettings
from paceline.ps.protocol.table_spec import TableSpec
from tests.children import server_process
from tests.ps.protocol.test_fuzz import serve_with_log
from tests.ps.raw_client import RawClient

SPEC = TableSpec("t", 10, 4)


class KeyClient(RawClient):
    """A raw client with keys, or with none."""

    def __init__(self, address: str, keys: ClientKeys | None, timeout_s: float = 20.0) -> None:
        self._keys = keys
        super().__init__(address, timeout_s)

    def connect(self, address: str) -> None:
        for name, value in ({} if self._keys is None else self._keys.curve()).items():
            setattr(self.socket, name, value)
        self.socket.connect(address)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_files_are_private(tmp_path: Path) -> None:
    server, client = make_keys(tmp_path / "keys")
    for directory in (tmp_path / "keys", server, server / "clients", client):
        assert mode(directory) == 0o700
    for path in (tmp_path / "keys").rglob("*.*"):
        assert mode(path) == 0o600
    assert set(read_server_keys(server).clients.values()) == {"client"}
    assert read_client_keys(client).server == read_server_keys(server).public


def test_one_more_client(tmp_path: Path) -> None:
    server, _ = make_keys(tmp_path)
    before = (server / "server.key").read_bytes()
    make_keys(tmp_path, "evening")
    assert (server / "server.key").read_bytes() == before
    assert set(read_server_keys(server).clients.values()) == {"client", "evening"}
    for name in ("client", "server", "../x", ""):
        with pytest.raises(ConfigurationError):
            make_keys(tmp_path, name)


def test_open_or_missing_or_wrong_keys(tmp_path: Path) -> None:
    server, client = make_keys(tmp_path)
    (server / "server.key").chmod(0o640)
    with pytest.raises(ConfigurationError, match="others can read the secret key"):
        read_server_keys(server)
    (client / "client.key").write_text("short")
    with pytest.raises(ConfigurationError, match="is no key"):
        read_client_keys(client)
    shutil.rmtree(client)
    with pytest.raises(ConfigurationError, match="paceline ps keys"):
        read_client_keys(client)


@pytest.mark.parametrize("name", ["server", "server/clients", "server/clients/client.pub"])
def test_who_could_change_the_keys_could_let_itself_in(name: str, tmp_path: Path) -> None:
    server, _ = make_keys(tmp_path)
    (tmp_path / name).chmod((tmp_path / name).stat().st_mode | 0o020)
    with pytest.raises(ConfigurationError, match=f"others can change .*{name}"):
        read_server_keys(server)


@pytest.mark.parametrize("name", ["client", "client/server.pub"])
def test_who_could_change_the_servers_key_could_take_its_place(name: str, tmp_path: Path) -> None:
    _, client = make_keys(tmp_path)
    (tmp_path / name).chmod((tmp_path / name).stat().st_mode | 0o002)
    with pytest.raises(ConfigurationError, match=f"others can change .*{name}"):
        read_client_keys(client)


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    server, client = make_keys(tmp_path)
    for keys in (read_server_keys(server), read_client_keys(client)):
        assert keys.secret.decode() not in repr(keys)


def test_tcp_needs_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="needs keys"):
        ServerSettings("tcp://127.0.0.1:*")
    with pytest.raises(ConfigurationError, match="keys are for tcp"):
        ServerSettings(f"ipc://{tmp_path}/s", keys=tmp_path)


@contextmanager
def tcp_server(keys: Path, tmp_path: Path) -> Iterator[str]:
    settings = ServerSettings("tcp://127.0.0.1:*", keys=keys)
    with server_process(serve_with_log, settings, str(tmp_path / "log")) as (address, _):
        yield address


@pytest.mark.usefixtures("fork_server")
def test_only_listed_keys_enter(tmp_path: Path) -> None:
    """A wrong key, a wrong server key and none at all: refused, logged, and others train on."""
    server, client = make_keys(tmp_path / "keys")
    _, strange = make_keys(tmp_path / "others")
    good, bad = read_client_keys(client), read_client_keys(strange)
    wrong_key = ClientKeys(bad.public, bad.secret, good.server)
    wrong_server = ClientKeys(good.public, good.secret, bad.server)
    with tcp_server(server, tmp_path) as address, KeyClient(address, good) as honest:
        honest.attach(SPEC)
        honest.write(0, SPEC, [1], torch.zeros(1, 4))
        for number, keys in enumerate((wrong_key, wrong_server, None), 1):
            stranger = KeyClient(address, keys, timeout_s=1.0)
            with stranger, pytest.raises(TimeoutError):
                stranger.hello()
            honest.push(0, SPEC, [1], torch.full((1, 4), -1.0), 1.0)
            assert honest.lookup(0, SPEC, [1])[0, 0] == number
        wait_for_log(tmp_path / "log", "its key is not in the server's clients/ directory")
        log = wait_for_log(tmp_path / "log", "its keys do not fit this server")
    for secret in (good.secret, bad.secret, read_server_keys(server).secret):
        assert secret.decode() not in log


def wait_for_log(path: Path, text: str) -> str:
    """What the log says once it says this."""
    until_s = time.monotonic() + 60
    while text not in (log := path.read_text()):
        assert time.monotonic() < until_s, log
        time.sleep(0.02)
    return log


def test_curve_is_there() -> None:
    assert zmq.has("curve"), "this libzmq has no encryption"
    assert logging.getLogger("paceline.ps").level == logging.NOTSET
