"""Whatever arrives at a server's port: it answers, logs a little, does not grow, hurts nobody."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
import zmq

from paceline.ps.protocol.settings import ServerSettings
from paceline.ps.protocol.table_spec import TableSpec
from paceline.ps.protocol.wire import (
    Dtype,
    Form,
    Head,
    Kind,
    Mode,
    Section,
    pack_control,
    unpack,
)
from paceline.ps.server.process import serve, set_up_logging
from tests.children import server_process
from tests.ps.data_messages import pack_data
from tests.ps.patient_client import SPEC, PatientClient
from tests.ps.raw_client import RawClient, attach_frames, rows_frames

WINDOW = 64
# The target of what is sent; the honest client's table has number 0.
TARGET = TableSpec("target", 64, 3, Dtype.FLOAT64)
IDS = [1, 5, 999]


def templates(client: bytes) -> list[list[bytes]]:
    """Messages that are right, or nearly so: what mutations begin with."""
    heads = {kind: Head(kind, 1, client, int(kind in (2, 4, 5, 8))) for kind in Kind}
    rows = torch.zeros(2, 3, dtype=torch.float64)
    bags = Section(1, Form.BAGS, Dtype.FLOAT64, 3, 2, Mode.SUM, True)
    integers = np.array([1, 2, 2, 0, 1]).tobytes()
    found = [
        pack_control(heads[Kind.HELLO], {"nonce": 1}),
        pack_control(heads[Kind.STATS], {}),
        attach_frames(heads[Kind.ATTACH], TARGET),
        rows_frames(heads[Kind.LOOKUP], [(1, TARGET, [1, 2], None, 0.0)]),
        rows_frames(heads[Kind.PUSH], [(1, TARGET, [1, 2], rows, 0.1)]),
        rows_frames(heads[Kind.WRITE], [(1, TARGET, [1, 2], rows, 0.0)]),
        pack_data(heads[Kind.LOOKUP], [bags], integers, bytes(24)),
        pack_data(heads[Kind.PUSH], [bags], integers, bytes(24 + 48)),
        pack_control(heads[Kind.LOAD], {"path": "../../etc"}),
        pack_control(heads[Kind.WELCOME], {}),
    ]
    return [[bytes(frame) for frame in frames] for frames in found]


def mutated(frames: list[bytes], chance: random.Random) -> list[bytes]:
    """One of: noise, flipped bytes, cut or longer frames, other frames, huge numbers."""
    frames = list(frames)
    which = chance.randrange(len(frames))
    frame = bytearray(frames[which])
    what = chance.randrange(7)
    if what == 0:
        return [chance.randbytes(chance.randrange(200)) for _ in range(chance.randrange(1, 6))]
    if what == 1:
        for _ in range(chance.randrange(1, 4)):
            if frame:
                frame[chance.randrange(len(frame))] = chance.randrange(256)
    elif what == 2:
        del frame[chance.randrange(len(frame) + 1) :]
    elif what == 3:
        frame += chance.randbytes(chance.randrange(1, 40))
    elif what == 4:
        return frames[:which] + frames[which + 1 :] or [b""]
    elif what == 5:
        return frames * chance.randrange(2, 6)
    elif len(frame) >= 8:
        start = chance.randrange(len(frame) - 7)
        frame[start : start + 8] = chance.choice([b"\xff" * 8, b"\xff" * 7 + b"\x7f", bytes(8)])
    frames[which] = bytes(frame)
    return frames


def serve_with_log(ready: Connection, settings: ServerSettings, log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    set_up_logging()
    serve(settings, ready.send)


@contextmanager
def server(tmp_path: Path) -> Iterator[tuple[str, int]]:
    settings = ServerSettings(f"ipc://{tmp_path / 's'}", save_root=tmp_path / "saves")
    with server_process(serve_with_log, settings, str(tmp_path / "log")) as (address, child):
        yield address, child.pid


def noise(path: str, chance: random.Random) -> None:
    """Bytes that are no ZeroMQ at all, at the bare socket."""
    for _ in range(100):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(path)
            raw.sendall(chance.choice([b"GET / HTTP/1.1\r\n\r\n", chance.randbytes(300), b""]))


class Honest(threading.Thread):
    """A client that trains meanwhile."""

    def __init__(self, client: PatientClient) -> None:
        super().__init__()
        self._client = client
        self.stop = threading.Event()
        self.pushed = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.stop.is_set():
                self._client.add_one(IDS)
                self.pushed += 1
                time.sleep(0.002)
        except BaseException as error:
            self.error = error


@pytest.mark.usefixtures("fork_server")
@pytest.mark.parametrize("count", [20_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_thousands_of_messages(count: int, tmp_path: Path) -> None:
    with server(tmp_path) as (address, pid), PatientClient(address) as client:
        client.attach_patiently()
        client.write_zeros(IDS)
        with RawClient(address) as other:
            assert other.attach(TARGET).control == {"table": 1}
        honest = Honest(client)
        honest.start()
        try:
            send_mutations(address, count // 5)
            noise(address.removeprefix("ipc://"), random.Random(1))
            before = resources(pid)
            answers = send_mutations(address, count - count // 5)
            noise(address.removeprefix("ipc://"), random.Random(2))
            until_s = time.monotonic() + 60
            while (after := resources(pid))["descriptors"] > before["descriptors"] + 2:
                assert time.monotonic() < until_s, "descriptors are left"
                time.sleep(0.02)
        finally:
            honest.stop.set()
            honest.join()
        assert honest.error is None
        assert honest.pushed > 5
        assert torch.equal(client.values(IDS), torch.full((3, SPEC.dim), float(honest.pushed)))
        assert after["rss_bytes"] - before["rss_bytes"] < 32 << 20
        assert client.stats()["refused"] > count // 2
    assert set(answers) >= {"wire", "version", "table", "id", "gap", "load", "DONE", "FOUND"}
    assert "internal" not in answers
    log = (tmp_path / "log").read_text()
    assert "[wire]" in log
    assert "more messages, not listed" in log
    assert "Traceback" not in log
    assert len(log.splitlines()) < 100
    assert not (tmp_path / "saves").exists()


def send_mutations(address: str, count: int) -> dict[str, int]:
    """Send so many; every one that is a whole ZeroMQ message is answered. Returns what came."""
    chance = random.Random(count)
    answers: dict[str, int] = {}
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.connect(address)
    forms = templates(b"fuzz" * 4)
    try:
        for sent in range(count):
            dealer.send_multipart(mutated(chance.choice(forms), chance))
            if sent >= WINDOW:
                take_answer(dealer, answers)
        for _ in range(min(WINDOW, count)):
            take_answer(dealer, answers)
    finally:
        dealer.close()
        context.term()
    return answers


def take_answer(dealer: zmq.Socket[bytes], answers: dict[str, int]) -> None:
    assert dealer.poll(60_000), "a message was not answered"
    answer = unpack(dealer.recv_multipart())
    name = answer.control["code"] if answer.head.kind is Kind.ERROR else answer.head.kind.name
    answers[name] = answers.get(name, 0) + 1


def resources(pid: int) -> dict[str, int]:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return {
        "rss_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
    }
