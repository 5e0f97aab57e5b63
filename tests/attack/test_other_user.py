"""Attacks by another user of the host, line by line of the threat model in docs/ps-operations.md.

What must hold: who is not the server's user, and has no key, reads nothing, changes nothing, makes
the server write nothing, and does not get a trainer to talk to a server of its own.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import zmq

from paceline import ps
from paceline.errors import ConfigurationError, ServerKeyError, ServerRefusedError
from paceline.ps.protocol.keys import make_keys, read_client_keys
from paceline.ps.protocol.settings import ServerSettings
from paceline.ps.protocol.shm_ring import GREETING, MAGIC
from paceline.ps.protocol.wire import Head, Kind, pack_control
from tests.attack.second_user import NOBODY, as_other_user, careless_server, shared_directory
from tests.ps.protocol.test_keys import KeyClient

pytestmark = [
    pytest.mark.usefixtures("fork_server"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
]


@pytest.fixture
def shared() -> Iterator[Path]:
    with shared_directory() as path:
        yield path


def knock_raw(path: str, words: bytes) -> dict[str, Any]:
    """Connect to a Unix socket, say something, and tell what came back."""
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(5)
        raw.connect(path)
        raw.sendall(words)
        return {"got": raw.recv(1000)}


def ask_by_zeromq(address: str) -> dict[str, Any]:
    """Say HELLO as a client would, and tell what came back."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(address)
        dealer.send_multipart(pack_control(Head(Kind.HELLO, 1, bytes(16)), {"nonce": 1}))
        return {"got": dealer.recv_multipart() if dealer.poll(1500) else None}


def train_at(address: str) -> dict[str, Any]:
    with ps.connect([address], timeout_s=30) as servers:
        return {"got": servers.stats()}


def read_all(root: str) -> list[str]:
    """What of a directory can be opened."""
    found = []
    for base, _, names in os.walk(root):
        for name in names:
            try:
                with open(os.path.join(base, name), "rb"):
                    found.append(name)
            except OSError:
                pass
    return found


def listed(path: Path) -> dict[str, int]:
    found = {}
    for each in path.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # an old journal, deleted meanwhile
            found[each.name] = stat.S_IMODE(each.lstat().st_mode)
    return found


def test_a_socket_in_a_shared_directory(shared: Path, tmp_path: Path) -> None:
    """umask 0, a directory for everybody: still only the server's user gets in."""
    settings = ServerSettings(f"ipc://{shared}/s", save_root=tmp_path / "saves")
    with careless_server(settings, tmp_path / "log") as address:
        modes = listed(shared)
        assert set(modes.values()) == {0o600}, modes
        for name in modes:
            words = GREETING.pack(MAGIC, bytes(16))
            found = as_other_user(knock_raw, str(shared / name), words)
            assert found.get("error") == "PermissionError", found
        assert as_other_user(ask_by_zeromq, address) == {"got": None}
        with ps.connect([address]) as servers:
            assert servers.stats()[0]["tables"] == []


def test_a_socket_that_was_opened_by_hand(shared: Path, tmp_path: Path) -> None:
    """chmod 666 behind the server's back: the kernel tells it who comes, and it is no client."""
    with careless_server(ServerSettings(f"ipc://{shared}/s"), tmp_path / "log") as address:
        for path in shared.iterdir():
            path.chmod(0o666)
        for name in ("s", "s.listener"):
            found = as_other_user(knock_raw, str(shared / name), GREETING.pack(MAGIC, bytes(16)))
            is_ended = found.get("error") in ("BrokenPipeError", "ConnectionResetError")
            assert is_ended or found == {"got": b""}, found
        assert as_other_user(ask_by_zeromq, address) == {"got": None}
    assert "it is of another user of this host" in (tmp_path / "log").read_text()


def test_a_trainer_of_another_user_is_told_at_once(shared: Path, tmp_path: Path) -> None:
    with careless_server(ServerSettings(f"ipc://{shared}/s"), tmp_path / "log") as address:
        found = as_other_user(train_at, address)
    assert found["error"] == "ServerKeyError"
    assert f"belongs to user 0, and this is user {NOBODY}" in found["text"]


def test_abstract_names_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="without a file"):
        ServerSettings("ipc://@tables")
    with pytest.raises(ConfigurationError, match="without a file"):
        ps.connect(["ipc://@tables"])


def test_files_are_private(tmp_path: Path, shared: Path) -> None:
    """Journals, snapshots, saves, keys: 0600 in 0700 whatever the umask."""
    state = shared / "state"
    settings = ServerSettings(f"ipc://{shared}/sockets/s", directory=state, snapshot_every_s=0.05)
    with careless_server(settings, tmp_path / "log") as address, ps.connect([address]) as servers:
        module = ps.Embedding(100, 4, servers=servers, name="secret", optimizer=ps.Adam(0.1))
        while not list(state.glob("snapshot-*")):
            module(torch.arange(100)).sum().backward()
            module.flush()
        files = servers.save("first")
        modes = listed(shared)
        directories = {"state", "saves", "first", "sockets"}
        assert {modes.pop(name) for name in directories} == {0o700}
        assert set(modes.values()) == {0o600}, modes
        assert set(files) < set(modes)
        assert as_other_user(read_all, str(shared)) == []
    old = os.umask(0)
    try:
        make_keys(shared / "keys")
    finally:
        os.umask(old)
    assert as_other_user(read_all, str(shared)) == []


@pytest.mark.parametrize("kind", [Kind.SAVE, Kind.LOAD])
def test_nobody_says_where_the_server_writes(kind: Kind, shared: Path, tmp_path: Path) -> None:
    root = shared / "saves"
    settings = ServerSettings(f"ipc://{shared}/sockets/s", save_root=root)
    target = tmp_path / "target"
    target.mkdir()
    with careless_server(settings, tmp_path / "log") as address, ps.connect([address]) as servers:
        ps.Embedding(10, 4, servers=servers, name="t")
        root.mkdir(exist_ok=True)
        (root / "link").symlink_to(target)
        (root / "planted").mkdir()
        (root / "planted" / "x.partial").symlink_to(target / "x")
        act = servers.save if kind is Kind.SAVE else servers.load
        for path in (target, "../target", root / ".." / "t", root / "link", root / "planted"):
            with pytest.raises(ServerRefusedError) as caught:
                act(path)
            assert caught.value.code == kind.name.lower()
            assert str(root) in str(caught.value)
        assert servers.save("right")
        servers.load(root / "right")
    assert list(target.iterdir()) == []


def test_tcp_on_the_loopback_needs_a_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="needs keys"):
        ServerSettings("tcp://127.0.0.1:*")
    server, client = make_keys(tmp_path / "keys")
    settings = ServerSettings("tcp://127.0.0.1:*", keys=server)
    with careless_server(settings, tmp_path / "log") as address:
        assert as_other_user(ask_by_zeromq, address) == {"got": None}
        assert as_other_user(read_client_keys, client)["error"] == "ConfigurationError"
        with KeyClient(address, read_client_keys(client)) as honest:
            assert honest.hello()["applied"] == 0


def listen_at(path: str) -> dict[str, Any]:
    """Take the place of a server, answer one trainer, and tell what it said."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 500)
        router.bind(f"ipc://{path}")
        os.chmod(path, 0o666)
        said = []
        while router.poll(4000):
            _peer, *frames = router.recv_multipart()
            said.append(len(frames))
        return {"said": said}


def test_a_false_server_is_not_talked_to(shared: Path) -> None:
    """Another user listens where the server should be: the trainer says nothing but HELLO."""
    found: list[Any] = []
    thread = Thread(target=lambda: found.append(as_other_user(listen_at, str(shared / "s"))))
    thread.start()
    try:
        while not (shared / "s").exists():
            thread.join(0.01)
        with pytest.raises(ServerKeyError, match=r"another user|belongs to user"):
            ps.connect([f"ipc://{shared}/s"], timeout_s=30)
    finally:
        thread.join()
    assert set(found[0]["said"]) <= {1}
