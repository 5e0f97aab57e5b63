"""More connections than a server has descriptors, at RLIMIT_NOFILE 1,024.

What must hold: the server lives and trains on with those it has, says that it is full, and lets
others in when there is room. (libzmq aborts the process that finds no descriptor for a connection.)
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from paceline import ps
from paceline.ps.client.shm_link import open_shm_link
from paceline.ps.protocol.settings import full_path
from paceline.ps.protocol.wire import Head, Kind, pack_control
from paceline.ps.server.descriptors import raise_descriptor_limit
from tests.ps.server.test_listener import small_server, until

pytestmark = pytest.mark.usefixtures("fork_server")

LIMIT = 1024
IDLE = 1100
ROWS = torch.arange(20_000)


@contextmanager
def busy(address: str) -> Iterator[list[int]]:
    """A trainer whose pushes are large: the server's loop is seldom at rest."""
    done = [0]
    stop = threading.Event()

    def train() -> None:
        with ps.connect([address]) as servers:
            module = ps.Embedding(
                len(ROWS), 64, servers=servers, name="busy", optimizer=ps.SGD(1.0)
            )
            module.write(ROWS, torch.zeros(len(ROWS), 64))
            while not stop.is_set():
                module(ROWS).sum().backward()
                done[0] += 1
            assert torch.equal(module.rows(ROWS), torch.full((len(ROWS), 64), -float(done[0])))
            done.append(-1)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        until(lambda: done[0] > 2)
        yield done
    finally:
        stop.set()
        thread.join()
    assert done[-1] == -1, "the trainer failed"


def test_idle_connections_while_the_server_is_busy(tmp_path: Path) -> None:
    """In bursts, as fast as they go, again and again."""
    raise_descriptor_limit()
    with small_server(tmp_path, LIMIT) as (address, pid), busy(address) as done:
        path = Path(address.removeprefix("ipc://"))
        for _ in range(3):
            before = done[0]
            with ExitStack() as stack:
                refused = 0
                for _ in range(IDLE):
                    idle = stack.enter_context(socket.socket(socket.AF_UNIX))
                    try:
                        idle.connect(os.fspath(path))
                    except (FileNotFoundError, ConnectionRefusedError):
                        refused += 1
                assert refused > 0, "everybody was let in"
                assert full_path(path).exists() or path.exists()
                assert len(os.listdir(f"/proc/{pid}/fd")) < LIMIT
                until(lambda before=before: done[0] > before + 1)  # type: ignore[misc]
            until(path.exists)
    assert "full: " in (tmp_path / "log").read_text()


def hello(dealer: Any) -> bool:
    dealer.send_multipart(pack_control(Head(Kind.HELLO, 1, os.urandom(16)), {"nonce": 1}))
    return bool(dealer.poll(3000))


def test_more_honest_trainers_than_there_is_room_for(tmp_path: Path) -> None:
    """Each says HELLO and asks for memory, as a trainer does, and stays."""
    raise_descriptor_limit()
    with (
        small_server(tmp_path, LIMIT) as (address, pid),
        zmq.Context() as context,
        ExitStack() as stack,
    ):
        context.set(zmq.MAX_SOCKETS, 4096)
        let_in = shared = 0
        while let_in < LIMIT:
            dealer = stack.enter_context(context.socket(zmq.DEALER))
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(address)
            if not hello(dealer):
                break
            let_in += 1
            memory = open_shm_link(address, os.urandom(16))
            if memory is not None:
                shared += 1
                stack.callback(memory.close)
        assert LIMIT > let_in > 335
        assert 100 < shared < let_in
        assert len(os.listdir(f"/proc/{pid}/fd")) < LIMIT
        stack.close()
        with ps.connect([address]) as servers:
            assert servers.stats()[0]["pid"] == pid
    assert "full: " in (tmp_path / "log").read_text()
