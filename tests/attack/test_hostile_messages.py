"""100,000 hostile messages at every way into a server that keeps a journal.

What must hold: each message is answered or its sender cut off; an honest trainer beside them loses
nothing; and after SIGKILL the server comes back from a journal that holds what was let through,
with the honest trainer's exact sums.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from paceline.launch.fork_server import shared_fork_server
from paceline.native.extension import native
from paceline.ps.client.shm_link import open_shm_link
from paceline.ps.protocol.keys import ClientKeys, make_keys, read_client_keys
from paceline.ps.protocol.settings import ServerSettings
from paceline.ps.protocol.shm_ring import GREETING, MAGIC
from paceline.ps.protocol.wire import Head, Kind, pack_control, unpack
from tests.ps.patient_client import SPEC, PatientClient
from tests.ps.protocol.test_fuzz import (
    IDS,
    TARGET,
    WINDOW,
    Honest,
    mutated,
    noise,
    resources,
    serve_with_log,
    take_answer,
    templates,
)
from tests.ps.protocol.test_keys import KeyClient
from tests.ps.raw_client import RawClient

OVER_ZEROMQ, OVER_RINGS, OVER_TCP = 45_000, 40_000, 15_000
KNOCKS, TORN = 2_000, 50
PLACES = (Kind.LOAD, Kind.SAVE, Kind.STAGE)
DEADLINE_S = 60.0


class HonestKeyClient(PatientClient, KeyClient):
    """Trains over tcp, with a key."""

    def __init__(self, address: str, keys: ClientKeys) -> None:
        KeyClient.__init__(self, address, keys)


class Attacked:
    """A server in a process of its own, which can be killed and started again."""

    def __init__(self, settings: ServerSettings, log: Path) -> None:
        self._settings, self._log = settings, log
        self.start()

    def start(self) -> None:
        self.process = shared_fork_server().fork()
        self.process.run(serve_with_log, self._settings, str(self._log))
        assert self.process.pipe.poll(DEADLINE_S), "the server did not start"
        self.address: str = self.process.pipe.recv()

    def kill(self) -> None:
        assert self.process.is_running(), "the server died by itself"
        self.process.send_signal(signal.SIGKILL)
        self.end(-signal.SIGKILL)

    def end(self, exitcode: int = 0) -> None:
        self.process.send_signal(signal.SIGTERM)
        found = self.process.wait(DEADLINE_S)
        self.process.close()
        assert found == exitcode


@contextmanager
def attacked(settings: ServerSettings, log: Path) -> Iterator[Attacked]:
    server = Attacked(settings, log)
    try:
        yield server
    finally:
        server.end()


def forms() -> list[list[bytes]]:
    """What mutations begin with; saves and loads too, of places that are not the server's.

    Wherever three wrong bytes lead: a save that succeeds could be loaded, which is no attack.
    """
    client = b"fuzz" * 4
    path = {"path": "../" * 20 + "etc", "relative": "../" * 20 + "x"}
    heads = [Head(kind, 1, client, int(kind is Kind.LOAD)) for kind in PLACES]
    found = [each for each in templates(client) if unpack(each).head.kind not in PLACES]
    return [*found, *([bytes(frame) for frame in pack_control(head, path)] for head in heads)]


def send_over_zeromq(dealer: Any, count: int, seed: int) -> dict[str, int]:
    """Send so many; returns what was answered, and each is."""
    chance = random.Random(seed)
    answers: dict[str, int] = {}
    shapes = forms()
    for sent in range(count):
        dealer.send_multipart(mutated(chance.choice(shapes), chance))
        if sent >= WINDOW:
            take_answer(dealer, answers)
    for _ in range(min(WINDOW, count)):
        take_answer(dealer, answers)
    return answers


def send_over_rings(address: str, count: int, seed: int) -> dict[str, int]:
    """The same in shared memory. A ring whose owner writes garbage over its words is cut off."""
    chance = random.Random(seed)
    answers: dict[str, int] = {}
    shapes = forms()
    ring: Any = None
    for sent in range(count):
        ring = ring or open_ring(address)
        frames = mutated(chance.choice(shapes), chance)[:3]
        while not ring.send(frames):
            take_from_ring(ring, answers)
        if sent % (count // TORN) == count // TORN - 1:
            while ring.awaited:
                take_from_ring(ring, answers)
            tear(ring, chance)
            ring.close()
            ring = None
    assert ring is None
    return answers


def open_ring(address: str) -> Any:
    """A busy server may take its time."""
    until_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < until_s:
        ring = open_shm_link(address, os.urandom(16))
        if ring is not None:
            return ring
    raise AssertionError("the server hands out no memory any more")


def take_from_ring(ring: Any, answers: dict[str, int]) -> None:
    frames, until_s = None, time.monotonic() + DEADLINE_S
    while frames is None and not ring.is_broken and time.monotonic() < until_s:
        frames = ring.receive(1000)  # may return early for nothing
    assert frames is not None, "a message in shared memory was not answered"
    if frames:
        answer = unpack(frames)
        name = answer.control["code"] if answer.head.kind is Kind.ERROR else answer.head.kind.name
        answers[name] = answers.get(name, 0) + 1


def tear(ring: Any, chance: random.Random) -> None:
    """Write anything over the words of both rings, and wake the server to look at them."""
    with open("/proc/self/maps") as maps:
        line = [each for each in maps if "memfd:paceline-ps" in each][-1]
    start = int(line.split("-")[0], 16)
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        for _ in range(chance.randrange(1, 4)):
            memory.seek(start + 8 * chance.randrange(64))
            memory.write(chance.choice([chance.randbytes(8), b"\xff" * 8, bytes(8)]))
    os.eventfd_write(ring._events[0], 1)


def knock_wrongly(path: str, count: int) -> int:
    """Say anything but the right words to the listener; returns how often it opened."""
    chance = random.Random(count)
    opened = 0
    for _ in range(count):
        word = bytearray(GREETING.pack(MAGIC, os.urandom(16)))
        word[chance.randrange(8)] ^= chance.randrange(1, 256)
        words = chance.choice([b"", bytes(word[:9]), bytes(word), chance.randbytes(200)])
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(path)
            raw.sendall(words)
            raw.settimeout(5 if words else 0.001)
            with suppress(TimeoutError, ConnectionResetError):
                opened += bool(raw.recv(1))
    return opened


def checked_sums(client: PatientClient, pushed: int) -> None:
    assert torch.equal(client.values(IDS), torch.full((3, SPEC.dim), float(pushed)))


@contextmanager
def training(client: PatientClient) -> Iterator[Honest]:
    """An honest trainer that goes on meanwhile."""
    honest = Honest(client)
    honest.start()
    try:
        yield honest
    finally:
        honest.stop.set()
        honest.join()
    assert honest.error is None
    assert honest.pushed > 20


def begin(client: PatientClient, other: RawClient) -> None:
    client.attach_patiently()
    client.write_zeros(IDS)
    assert other.attach(TARGET).control == {"table": 1}


@pytest.mark.usefixtures("fork_server")
@pytest.mark.timeout(300)
@pytest.mark.skipif(native is None, reason="needs the native core: a C compiler")
def test_every_way_in_over_ipc(tmp_path: Path) -> None:
    settings = ServerSettings(
        f"ipc://{tmp_path / 's'}", tmp_path / "state", False, 0.5, save_root=tmp_path / "saves"
    )
    with attacked(settings, tmp_path / "log") as server, PatientClient(server.address) as client:
        with RawClient(server.address) as other:
            begin(client, other)
        path = server.address.removeprefix("ipc://")
        with training(client) as honest:
            send_over_rings(server.address, OVER_RINGS // 5, 1)
            before = resources(server.process.pid)
            with RawClient(server.address) as hostile:
                answers = send_over_zeromq(hostile.socket, OVER_ZEROMQ, 2)
            ring_answers = send_over_rings(server.address, OVER_RINGS - OVER_RINGS // 5, 3)
            assert knock_wrongly(path + ".listener", KNOCKS) == 0
            noise(path, random.Random(4))
            noise(path + ".listener", random.Random(5))
            after = resources(server.process.pid)
        checked_sums(client, honest.pushed)
        assert sum(answers.values()) == OVER_ZEROMQ
        for found in (answers, ring_answers):
            assert set(found) >= {"wire", "table", "id", "gap", "load", "save", "DONE", "FOUND"}
            assert "internal" not in found
        assert after["rss_bytes"] - before["rss_bytes"] < 64 << 20
        assert after["descriptors"] <= before["descriptors"] + 10
        server.kill()
        server.start()
        checked_sums(client, honest.pushed)
    assert "Traceback" not in (tmp_path / "log").read_text()
    assert not (tmp_path / "saves").exists()
    assert not (tmp_path / "x").exists()


@pytest.mark.usefixtures("fork_server")
@pytest.mark.timeout(300)
def test_over_tcp_with_a_key(tmp_path: Path) -> None:
    """Who has a key may send anything; who has none sends noise at the port."""
    server_keys, client_keys = make_keys(tmp_path / "keys")
    keys = read_client_keys(client_keys)
    with socket.socket() as probe:  # a restart needs the same port
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = ServerSettings(
        f"tcp://127.0.0.1:{port}", tmp_path / "state", False, 0.5, keys=server_keys
    )
    with (
        attacked(settings, tmp_path / "log") as server,
        HonestKeyClient(server.address, keys) as client,
    ):
        with KeyClient(server.address, keys) as other:
            begin(client, other)
        with training(client) as honest:
            with KeyClient(server.address, keys) as hostile:
                answers = send_over_zeromq(hostile.socket, OVER_TCP, 6)
            noise_at_port(port)
            with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
                stranger.setsockopt(zmq.LINGER, 0)
                stranger.connect(server.address)
                stranger.send_multipart(forms()[0])
                assert not stranger.poll(500)
        checked_sums(client, honest.pushed)
        assert sum(answers.values()) == OVER_TCP
        assert "internal" not in answers
        server.kill()
        server.start()
        checked_sums(client, honest.pushed)
    assert "Traceback" not in (tmp_path / "log").read_text()


def noise_at_port(port: int) -> None:
    chance = random.Random(port)
    for _ in range(200):
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(chance.choice([b"GET / HTTP/1.1\r\n\r\n", chance.randbytes(300), b"\xff"]))
