"""A server that is killed comes back with every acknowledged push, once."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from paceline import ps
from paceline.errors import ServerStartError
from paceline.launch.child import Child
from paceline.ps.protocol.settings import ServerSettings
from paceline.ps.protocol.wire import Kind, pack_control
from paceline.ps.server.process import serve
from paceline.ps.storage import faults
from paceline.ps.storage.faults import FaultPoint
from tests.children import child_process
from tests.ps.patient_client import SPEC, PatientClient

IDS = [1, 5, 999]
PUSH_PLACES = [FaultPoint.CHECKED, FaultPoint.APPENDED, FaultPoint.APPLIED, FaultPoint.SENT]
SNAPSHOT_PLACES = [
    FaultPoint.ROTATED,
    FaultPoint.WRITING,
    FaultPoint.WRITTEN,
    FaultPoint.RENAMED,
    FaultPoint.CLEANING,
]


def serve_until_fault(ready: Connection, settings: ServerSettings, place: str | None) -> None:
    """A server that kills itself the 7th time that it reaches a place (a snapshot: the 2nd)."""
    server = os.getpid()
    wanted = None if place is None else FaultPoint[place]
    left = 7 if wanted in PUSH_PLACES else 1
    if wanted in (FaultPoint.ROTATED, FaultPoint.CLEANING):
        left = 2

    def hook(reached: FaultPoint) -> None:
        nonlocal left
        if reached is wanted:
            left -= 1
            if not left:
                os.kill(server, signal.SIGKILL)
                time.sleep(60)  # in the child: until it is killed with its parent

    faults.hook = hook
    serve(settings, ready.send)


@contextmanager
def running(settings: ServerSettings, place: FaultPoint | None) -> Iterator[Child]:
    name = None if place is None else place.name
    with child_process(serve_until_fault, settings, name) as child:
        assert child.pipe.poll(60), "the server did not start"
        child.pipe.recv()
        yield child


@pytest.mark.usefixtures("fork_server")
@pytest.mark.parametrize("place", PUSH_PLACES + SNAPSHOT_PLACES, ids=lambda place: place.name)
def test_killed_at(place: FaultPoint, tmp_path: Path) -> None:
    """No push is lost and none applied twice, wherever the server dies."""
    every_s = 0.2 if place in SNAPSHOT_PLACES else 0.0
    settings = ServerSettings(
        f"ipc://{tmp_path / 'socket'}", tmp_path / "state", snapshot_every_s=every_s
    )
    with PatientClient(settings.address) as client:
        pushed = -1  # on a busy machine the server may die before the rows are there
        with running(settings, place) as child:
            client.attach_patiently()
            with contextlib.suppress(ConnectionError):
                client.write_zeros(IDS, child.is_running)
                pushed = 0
                while True:  # a place that is not reached ends at the deadline of the test
                    client.add_one(IDS, child.is_running)
                    pushed += 1
            assert child.wait(60) == -signal.SIGKILL, f"{place} was not reached"
        with running(dataclasses.replace(settings, snapshot_every_s=0.0), None):
            assert not list((tmp_path / "state").glob("*.partial"))
            client.send_again()
            client.finish()
            client.send_again()
            pushed += 1
            for _ in range(5):
                client.add_one(IDS)
                pushed += 1
            assert torch.equal(client.values(IDS), torch.full((3, SPEC.dim), float(pushed)))


def test_every_place_is_tried() -> None:
    assert {*PUSH_PLACES, *SNAPSHOT_PLACES, FaultPoint.LOADED} == set(FaultPoint)


@pytest.mark.usefixtures("fork_server")
def test_killed_in_a_load(tmp_path: Path) -> None:
    """It comes back as it was before, and does it when it is asked again."""
    settings = ServerSettings(
        f"ipc://{tmp_path / 'socket'}", tmp_path / "state", save_root=tmp_path
    )
    with PatientClient(settings.address) as client:
        with running(settings, FaultPoint.LOADED) as child:
            client.attach_patiently()
            client.write_zeros(IDS)
            client.add_one(IDS)
            client.control(Kind.SAVE, {"path": str(tmp_path / "saved")})
            client.add_one(IDS)
            load = pack_control(client.next_head(Kind.LOAD), {"path": str(tmp_path / "saved")})
            client.socket.send_multipart(load)
            assert child.wait(60) == -signal.SIGKILL
        with running(settings, None):
            assert client.values(IDS)[0, 0] == 2.0
            client.deliver(load)
            assert client.values(IDS)[0, 0] == 1.0


@pytest.mark.parametrize("times", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_sigkill_again_and_again(
    start_servers: Callable[..., ps.LocalServers], tmp_path: Path, times: int
) -> None:
    """The servers come back by themselves, and the sums are exact."""
    servers = start_servers(1, directory=tmp_path, restart=True, snapshot_every_s=0.1)
    kills = 0
    stop = threading.Event()

    def kill_now_and_then() -> None:
        nonlocal kills
        chance = random.Random(6)
        killed = 0
        # At least one kill has to come while a push is under way.
        while (kills < times or not client.resent) and not stop.wait(chance.uniform(0.02, 0.25)):
            pid = int((tmp_path / "0" / "lock").read_text() or 0)
            if pid and pid != killed:
                os.kill(pid, signal.SIGKILL)
                killed, kills = pid, kills + 1

    with PatientClient(servers.addresses[0]) as client:
        client.attach_patiently()
        client.write_zeros(IDS)
        killer = threading.Thread(target=kill_now_and_then)
        killer.start()
        pushed = 0
        try:
            while killer.is_alive() or pushed < 200:
                client.add_one(IDS)
                pushed += 1
        finally:
            stop.set()
            killer.join()
        assert kills >= times
        assert client.resent > 0
        assert torch.equal(client.values(IDS), torch.full((3, SPEC.dim), float(pushed)))


@pytest.mark.parametrize("missing", [1, 60, 170])
def test_torn_end_is_cut_off(
    start_servers: Callable[..., ps.LocalServers], tmp_path: Path, missing: int
) -> None:
    servers = start_servers(1, directory=tmp_path)
    with PatientClient(servers.addresses[0]) as client:
        client.attach_patiently()
        client.write_zeros(IDS)
        journal = tmp_path / "0" / "journal-00000000.log"
        before = journal.stat().st_size
        client.add_one(IDS)
        servers.kill(0)
        whole = journal.read_bytes()
        journal.write_bytes(whole + whole[before:-missing])  # the push again, killed inside of it
        servers.restart(0)
        client.add_one(IDS)
        assert torch.equal(client.values(IDS), torch.full((3, SPEC.dim), 2.0))
        servers.kill(0)
        servers.restart(0)
        assert torch.equal(client.values(IDS), torch.full((3, SPEC.dim), 2.0))


def test_damage_is_not_guessed_at(
    start_servers: Callable[..., ps.LocalServers], tmp_path: Path
) -> None:
    servers = start_servers(1, directory=tmp_path)
    with PatientClient(servers.addresses[0]) as client:
        client.attach_patiently()
        for _ in range(5):
            client.add_one(IDS)
    servers.kill(0)
    journal = tmp_path / "0" / "journal-00000000.log"
    data = bytearray(journal.read_bytes())
    data[len(data) // 2] ^= 1
    journal.write_bytes(data)
    with pytest.raises(ServerStartError, match=r"damaged at byte \d+ .*truncate -s"):
        servers.restart(0)
    assert journal.read_bytes() == data, "nothing was cut off"


@pytest.mark.parametrize(
    ("file", "change", "text"),
    [
        ("journal-00000000.log", b"PLPJ\2", "of version 2"),
        ("journal-00000000.log", b"nonsense", "no journal of a Paceline server"),
        ("journal-00000000.log", b"PLPJ\1\0\0\0\7", "number 7: files were renamed"),
    ],
)
def test_wrong_journal(
    start_servers: Callable[..., ps.LocalServers],
    tmp_path: Path,
    file: str,
    change: bytes,
    text: str,
) -> None:
    servers = start_servers(1, directory=tmp_path)
    with PatientClient(servers.addresses[0]) as client:
        client.attach_patiently()
    servers.kill(0)
    path = tmp_path / "0" / file
    path.write_bytes(change + path.read_bytes()[len(change) :])
    with pytest.raises(ServerStartError, match=text):
        servers.restart(0)


def test_damaged_snapshot(start_servers: Callable[..., ps.LocalServers], tmp_path: Path) -> None:
    servers = start_servers(1, directory=tmp_path)
    with PatientClient(servers.addresses[0]) as client:
        client.attach_patiently()
        client.add_one(IDS)
    servers.close()
    (path,) = (tmp_path / "0").glob("snapshot-*")
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ServerStartError, match=f"{path.name} cannot be read"):
        start_servers(1, directory=tmp_path)


def test_missing_journal(start_servers: Callable[..., ps.LocalServers], tmp_path: Path) -> None:
    servers = start_servers(1, directory=tmp_path)
    servers.close()
    (tmp_path / "0" / "journal-00000000.log").rename(tmp_path / "0" / "journal-00000003.log")
    with pytest.raises(ServerStartError, match=r"journal-00000000.log is missing"):
        start_servers(1, directory=tmp_path)


def test_two_servers_cannot_share_a_directory(
    start_servers: Callable[..., ps.LocalServers], tmp_path: Path
) -> None:
    start_servers(1, directory=tmp_path)
    with pytest.raises(ServerStartError, match=r"in use by another server \(process \d+\)"):
        start_servers(1, directory=tmp_path)


def test_memory_only_comes_back_empty(start_servers: Callable[..., ps.LocalServers]) -> None:
    """What tells a client: a smaller number than was acknowledged, and another incarnation."""
    servers = start_servers(1)
    with PatientClient(servers.addresses[0]) as client:
        client.attach_patiently()
        before = client.hello()
        servers.kill(0)
        servers.restart(0)
        after = client.hello()
    assert (before["applied"], after["applied"]) == (1, 0)
    assert before["incarnation"] != after["incarnation"]
    assert not after["durable"]


def test_refusal_is_repeated_after_a_restart(
    start_servers: Callable[..., ps.LocalServers], tmp_path: Path
) -> None:
    """A refused push counts, and who asks again hears the same, also from the next incarnation."""
    servers = start_servers(1, directory=tmp_path)
    with PatientClient(servers.addresses[0]) as client:
        client.attach_patiently()
        wrong = pack_control(client.next_head(Kind.ATTACH), {"table": {}, "shard": {}})
        first = client.ask(wrong).control
        servers.kill(0)
        servers.restart(0)
        assert client.hello()["applied"] == 2
        assert client.ask(wrong).control == first
        assert first["code"] == "table"
