"""Hosts that wait for each other say for whom, and where."""

from __future__ import annotations

import contextlib
import datetime
import json
import multiprocessing
import re
import socket
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from paceline.launch import rendezvous
from paceline.launch.rendezvous import Endpoint, JobHosts

DEADLINE_S = 60.0


@pytest.fixture(autouse=True, scope="module")
def _first_store() -> None:
    """libuv keeps a pipe for as long as the process lives."""
    rendezvous._serve(Endpoint("localhost", 0), 1)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_TELL_S", 0.02)


@pytest.fixture
def pipe() -> Iterator[tuple[Connection, Connection]]:
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        yield ours, theirs


def hear(pipe: Connection) -> str:
    assert pipe.poll(DEADLINE_S)
    text: str = json.loads(pipe.recv_bytes())["waiting"]
    return text


@contextlib.contextmanager
def meeting(store: Any, hosts: JobHosts, pipe: Connection) -> Iterator[list[list[int]]]:
    found: list[list[int]] = []
    thread = threading.Thread(target=lambda: found.append(rendezvous._meet(store, hosts, pipe)))
    thread.start()
    yield found
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_who_is_missing(pipe: tuple[Connection, Connection]) -> None:
    ours, theirs = pipe
    served = rendezvous._serve(Endpoint("localhost", 0), 3)
    where = Endpoint("localhost", served.port)
    with meeting(served, JobHosts(3, 0, 4, where), theirs) as found:
        expected = f"host 0 waits at port {served.port} for hosts 1, 2 of 3: is paceline run"
        while expected not in (text := hear(ours)):  # until its own name has arrived
            assert f"host 0 waits at port {served.port} for hosts 0, 1, 2 of 3" in text
        assert re.search(r"Waited \d+ s of 900 s", text)
        limit = datetime.timedelta(seconds=DEADLINE_S)
        stores = [dist.TCPStore("localhost", where.port, None, False, limit) for _ in range(2)]
        with meeting(stores[0], JobHosts(3, 1, 2, where), theirs):
            while "for host 2 of 3" not in (text := hear(ours)):
                assert text
            assert rendezvous._meet(stores[1], JobHosts(3, 2, 1, where), theirs) == [4, 2, 1]
    assert found == [[4, 2, 1]]


def test_nobody_is_there(
    pipe: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While torch's store waits: it must not hold the interpreter."""
    monkeypatch.setattr(rendezvous, "JOIN_S", 5.0)
    ours, theirs = pipe
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        endpoint = Endpoint("localhost", taken.getsockname()[1])
        with pytest.raises(dist.DistNetworkError):
            rendezvous._reach(JobHosts(2, 1, 1, endpoint), theirs)
    text = hear(ours)
    assert f"host 1 cannot reach host 0 at localhost:{endpoint.port} yet" in text


def test_the_store_of_one_host_is_for_this_host_only() -> None:
    served = rendezvous._serve(Endpoint("localhost", 0), 1)
    port = f":{served.port:04X}"
    lines = "".join(Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")).splitlines()
    fields = [line.split() for line in lines]
    listening = [each[1] for each in fields if each[1].endswith(port) and each[3] == "0A"]
    assert listening == [f"0100007F{port}"]


def test_nobody_comes(pipe: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "JOIN_S", 0.2)
    served = rendezvous._serve(Endpoint("localhost", 0), 2)
    with pytest.raises(RuntimeError, match=r"waits at port .* for host 1 of 2"):
        rendezvous._meet(served, JobHosts(2, 0, 1, Endpoint("localhost", served.port)), pipe[1])
