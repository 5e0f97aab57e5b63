"""The write-ahead log: what was written comes back, whatever became of its end."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from paceline.errors import ServerStateError
from paceline.ps.durable import Durable
from paceline.ps.handler import Handler
from paceline.ps.journal import Journal, read_journal
from paceline.ps.saving import SavePlace
from paceline.ps.spec import TableSpec
from paceline.ps.store import Store
from paceline.ps.wire import Head, Kind
from tests.ps.raw_client import attach_frames, rows_frames

RECORDS = [[b"one", b""], [b"x" * 100], [b"a", b"bb", b"ccc" * 50]]


def write(path: Path) -> list[int]:
    """Write the records; returns where each ends."""
    journal = Journal(path, 3, fsync=True)
    ends = [path.stat().st_size]
    for frames in RECORDS:
        journal.append(frames)
        journal.sync()
        ends.append(path.stat().st_size)
    journal.close()
    return ends


def read(path: Path, is_last: bool = True) -> list[list[bytes]]:
    return [[bytes(frame) for frame in frames] for frames in read_journal(path, 3, is_last)]


def test_comes_back_and_can_be_continued(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path)
    write(path)
    assert read(path) == RECORDS * 2
    assert path.stat().st_mode & 0o777 == 0o600


def test_cut_at_every_byte(tmp_path: Path) -> None:
    """A prefix of the file is a prefix of the records, and its torn end is removed."""
    path = tmp_path / "journal"
    ends = write(path)
    whole = path.read_bytes()
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        complete = sum(length >= end for end in ends[1:])
        assert read(path) == RECORDS[:complete]
        kept = ends[complete] if length >= ends[0] else 0
        assert path.stat().st_size == kept, f"cut at {length}"


def test_any_changed_byte_is_seen(tmp_path: Path) -> None:
    """Never other records than were written: an error, or the last one is taken for torn."""
    path = tmp_path / "journal"
    ends = write(path)
    whole = path.read_bytes()
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 0x55
        path.write_bytes(changed)
        try:
            found = read(path)
        except ServerStateError:
            assert path.read_bytes() == changed, "nothing was cut off"
        else:
            assert place >= ends[2], "only the last record can be taken for torn"
            assert found == RECORDS[:2]


def test_zeros_at_the_end_are_a_crash_of_the_machine(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path)
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(bytes(10_000))
    assert read(path) == RECORDS
    assert path.stat().st_size == size


def test_only_the_last_journal_may_be_torn(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ServerStateError, match="damaged at byte"):
        read(path, is_last=False)


def test_a_full_disk_ends_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is applied or acknowledged that is not in the journal."""
    spec = TableSpec("t", 10, 4)
    store = Store(1 << 20, 1 << 20)
    durable = Durable(tmp_path, store, fsync=False)
    handler = Handler(store, durable, SavePlace(None, is_open=False))
    client = bytes(16)
    handler.answer(attach_frames(Head(Kind.ATTACH, 1, client, 1), spec))

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "writev", full)
    push = rows_frames(Head(Kind.PUSH, 2, client, 2), [(0, spec, [1], torch.ones(1, 4), 1.0)])
    with pytest.raises(ServerStateError, match=r"No space left.*make room and start it again"):
        handler.answer(push)
    assert store.tables[0].count == 0
    assert store.clients.applied(client) == 1
    monkeypatch.undo()
    durable.close()
    again = Store(1 << 20, 1 << 20)
    Durable(tmp_path, again, fsync=False).close()
    assert again.clients.applied(client) == 1
    assert again.tables[0].spec == spec
