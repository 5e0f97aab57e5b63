"""A server that runs out of descriptors: it lets nobody in, says so, and goes on."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import zmq

from paceline import ps
from paceline.errors import ServerLostError, ServerStartError
from paceline.ps.protocol.settings import ServerSettings, full_path
from paceline.ps.server import listener
from paceline.ps.server.descriptors import DescriptorLimit, used
from paceline.ps.server.listener import SocketFile
from tests.children import child_process, server_process
from tests.ps.protocol.test_fuzz import serve_with_log

LIMIT = 160
DEADLINE_S = 60.0


def until(is_met: Callable[[], bool]) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while not is_met():
        assert time.monotonic() < until_s, "it did not come to that"
        time.sleep(0.01)


def serve_with_few(ready: Connection, settings: ServerSettings, log: str, limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    serve_with_log(ready, settings, log)


@contextmanager
def small_server(path: Path, limit: int = LIMIT) -> Iterator[tuple[str, int]]:
    """A server with few descriptors; gives its address and its process."""
    settings = ServerSettings(f"ipc://{path / 's'}", directory=path / "state", snapshot_every_s=0.2)
    arguments = (settings, str(path / "log"), limit)
    with server_process(serve_with_few, *arguments) as (address, child):
        yield address, child.pid


def train(module: ps.Embedding, steps: int) -> None:
    for _ in range(steps):
        module(torch.arange(5)).sum().backward()


@pytest.mark.usefixtures("fork_server")
def test_more_connections_than_descriptors(tmp_path: Path) -> None:
    """Who is in trains on, journal and snapshots included; the others wait, and are told why."""
    with small_server(tmp_path) as (address, pid), ps.connect([address]) as servers:
        module = ps.Embedding(10, 4, servers=servers, name="t", optimizer=ps.SGD(1.0))
        module.write(torch.arange(10), torch.zeros(10, 4))
        path = Path(address.removeprefix("ipc://"))
        with ExitStack() as stack:
            for _ in range(2 * LIMIT):
                idle = stack.enter_context(socket.socket(socket.AF_UNIX))
                try:
                    idle.connect(os.fspath(path))
                except (FileNotFoundError, ConnectionRefusedError):
                    break
            else:
                pytest.fail("everybody was let in")
            assert full_path(path).exists()
            train(module, 20)
            with pytest.raises(ServerLostError, match="the server is full"):
                ps.connect([address], timeout_s=1.5)
        until(path.exists)
        with ps.connect([address]) as others:
            assert others.stats()[0]["pid"] == pid
        module.flush()
        assert torch.equal(module.rows(torch.arange(5)), torch.full((5, 4), -20.0))
    assert "full: " in (tmp_path / "log").read_text()
    assert "Traceback" not in (tmp_path / "log").read_text()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["log", "state"]


@pytest.mark.usefixtures("fork_server")
def test_idle_connections_at_the_door(tmp_path: Path) -> None:
    """The other socket, where shared memory is handed out: the same."""
    with small_server(tmp_path) as (address, _), ps.connect([address]) as servers:
        module = ps.Embedding(10, 4, servers=servers, name="t", optimizer=ps.SGD(1.0))
        module.write(torch.arange(10), torch.zeros(10, 4))
        with ExitStack() as stack:
            for _ in range(4 * LIMIT):
                idle = stack.enter_context(socket.socket(socket.AF_UNIX))
                idle.connect(address.removeprefix("ipc://") + ".listener")
            train(module, 20)
            with ps.connect([address]) as others:
                other = ps.Embedding(10, 4, servers=others, name="t", optimizer=ps.SGD(1.0))
                train(other, 1)
        module.flush()
        assert torch.equal(module.rows(torch.arange(5)), torch.full((5, 4), -21.0))


@pytest.mark.usefixtures("fork_server")
def test_trainers_beyond_the_shared_memory_use_zeromq(tmp_path: Path) -> None:
    with small_server(tmp_path) as (address, _), ExitStack() as stack:
        routes = []
        for _ in range(LIMIT // 8):
            servers = stack.enter_context(ps.connect([address]))
            module = ps.Embedding(10, 4, servers=servers, name="t", optimizer=ps.SGD(1.0))
            train(module, 1)
            module.flush()
            routes += servers.routes
        assert routes[0] == "shared memory"
        assert routes[-1] == "ipc"


def test_too_few_for_a_server() -> None:
    assert DescriptorLimit(8).is_too_small
    assert not DescriptorLimit(1 << 16).is_too_small


@pytest.mark.usefixtures("fork_server")
def test_a_server_with_hardly_any_does_not_start(tmp_path: Path) -> None:
    arguments = (ServerSettings(f"ipc://{tmp_path / 's'}"), str(tmp_path / "log"), 40)
    with child_process(serve_with_few, *arguments) as child:
        assert child.wait(DEADLINE_S) == 1
    assert ServerStartError.__name__ in (tmp_path / "log").read_text()
    assert "ulimit -n" in (tmp_path / "log").read_text()


def test_the_socket_file_leaves_nothing(tmp_path: Path) -> None:
    before = used()
    socket_file = SocketFile(tmp_path / "s", DescriptorLimit(1 << 16))
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
    socket_file.close()
    assert used() == before
    assert list(tmp_path.iterdir()) == []


def test_a_socket_that_cannot_be_renamed_can_be_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full, and its directory is gone: close() waits for the thread."""

    class Native:
        def guard(self, *_: object) -> bool:
            raise FileNotFoundError

    monkeypatch.setattr(listener, "native", Native())
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        found = SocketFile(tmp_path / "s", DescriptorLimit(LIMIT))
        found.watch(router.get_monitor_socket(zmq.EVENT_ACCEPTED), lambda _: None)
        closing = threading.Thread(target=found.close, daemon=True)
        closing.start()
        closing.join(DEADLINE_S)
        assert not closing.is_alive()
