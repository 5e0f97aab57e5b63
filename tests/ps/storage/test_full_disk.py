"""A disk that is full ends a server; with room it goes on, and nothing is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
from pathlib import Path

import pytest
import torch

from paceline.errors import ServerStateError
from paceline.launch.child import Child
from paceline.ps.protocol.settings import ServerSettings
from paceline.ps.protocol.wire import Head, Kind
from paceline.ps.server.dispatch import Handler
from paceline.ps.server.save_root import SaveRoot
from paceline.ps.state.store import Store
from paceline.ps.storage.durable import Durable
from paceline.ps.storage.journal import Journal
from tests.ps.killed_durable import close_as_killed
from tests.ps.patient_client import SPEC, PatientClient
from tests.ps.raw_client import attach_frames, rows_frames
from tests.ps.storage.full_disk import running, small_file_system

IDS = [1, 5, 999]
SMALL = 256 << 10


def push_until_it_ends(client: PatientClient, server: Child, text: str) -> int:
    """Returns how many pushes were acknowledged."""
    pushed = 0
    with contextlib.suppress(ConnectionError):
        while pushed < 20_000:
            client.add_one(IDS, server.is_running)
            pushed += 1
    assert server.wait(60) == 3, "the disk was not full"
    assert text in server.pipe.recv()
    return pushed


@pytest.mark.usefixtures("fork_server")
@pytest.mark.parametrize("fsync", [False, True])
@pytest.mark.parametrize("how", ["tmpfs", "rlimit"])
def test_make_room_and_start_again(how: str, fsync: bool, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    settings = ServerSettings(f"ipc://{tmp_path / 'socket'}", disk / "state", fsync, 0.0)
    with contextlib.ExitStack() as stack:
        most_bytes = SMALL
        if how == "tmpfs":
            stack.enter_context(small_file_system(disk, SMALL))
            most_bytes = 0
        client = stack.enter_context(PatientClient(settings.address))
        with running(settings, most_bytes) as server:
            client.attach_patiently()
            client.write_zeros(IDS)
            text = "No space left" if how == "tmpfs" else "File too large"
            pushed = push_until_it_ends(client, server, text)
            assert pushed > 100
        if how == "tmpfs":
            subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
        with running(dataclasses.replace(settings, snapshot_every_s=0.0)):
            client.send_again()
            client.finish()
            pushed += 1
            for _ in range(5):
                client.add_one(IDS)
                pushed += 1
            assert torch.equal(client.values(IDS), torch.full((3, SPEC.dim), float(pushed)))


@pytest.mark.usefixtures("fork_server")
def test_snapshots_that_do_not_fit(tmp_path: Path) -> None:
    """The server goes on with its journals until they do not fit either; nothing is lost."""
    disk = tmp_path / "disk"
    settings = ServerSettings(f"ipc://{tmp_path / 'socket'}", disk / "state", False, 0.005)
    rows = list(range(SPEC.rows))
    with small_file_system(disk, 52 << 10), PatientClient(settings.address) as client:
        with running(settings) as server:
            client.attach_patiently()
            client.write_zeros(rows)
            pushed = push_until_it_ends(client, server, "No space left")
            journals = list((disk / "state").glob("journal-*.log"))
            assert len(journals) > 1, "one of them waits for a snapshot that did not fit"
        subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
        with running(settings):
            client.send_again()
            client.finish()
            assert torch.equal(client.values(IDS), torch.full((3, SPEC.dim), pushed + 1.0))
            others = [row for row in rows if row not in IDS]
            assert not client.values(others).any()


def filled(directory: Path, pushes: int) -> Path:
    """A directory of a server that was killed after so many pushes; returns its journal."""
    store = Store(1 << 20, 1 << 20)
    durable = Durable(directory, store, fsync=False)
    handler = Handler(store, durable, SaveRoot(None))
    handler.answer(attach_frames(Head(Kind.ATTACH, 1, bytes(16), 1), SPEC))
    for number in range(2, pushes + 2):
        part = (0, SPEC, [number], torch.ones(1, SPEC.dim), 1.0)
        handler.answer(rows_frames(Head(Kind.PUSH, number, bytes(16), number), [part]))
    close_as_killed(durable)
    return directory / "journal-00000000.log"


def recovered(directory: Path) -> int:
    """How much of client 0 comes back."""
    store = Store(1 << 20, 1 << 20)
    Durable(directory, store, fsync=False).close()
    return store.clients.applied(bytes(16))


@pytest.mark.parametrize("behind", ["nothing", "an empty file", "a head", "half a record"])
def test_a_torn_end_with_no_record_behind_it_is_cut(
    behind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk tears a record, and the last snapshot's journal behind it stays empty."""
    journal = filled(tmp_path, 3)
    journal.write_bytes(journal.read_bytes()[:-5])
    follower = tmp_path / "journal-00000001.log"
    if behind == "an empty file":
        follower.write_bytes(b"")
    elif behind != "nothing":
        Journal(follower, 1, fsync=False).close()
    if behind == "half a record":
        follower.write_bytes(follower.read_bytes() + journal.read_bytes()[16:40])
    assert recovered(tmp_path) == 3
    assert "journal-00000000.log ended in a message that was not written completely" in caplog.text
    assert recovered(tmp_path) == 3


def test_a_torn_end_with_records_behind_it_is_damage(tmp_path: Path) -> None:
    journal = filled(tmp_path, 3)
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-5])
    follower = tmp_path / "journal-00000001.log"
    Journal(follower, 1, fsync=False).close()
    follower.write_bytes(follower.read_bytes() + whole[16:])
    with pytest.raises(ServerStateError, match=r"journal-00000000.log is damaged at byte \d+"):
        recovered(tmp_path)
    assert journal.read_bytes() == whole[:-5]
