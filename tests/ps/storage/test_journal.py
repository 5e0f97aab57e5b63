"""The write-ahead log: what was written comes back, whatever became of its end."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from paceline.errors import ServerStateError
from paceline.ps.protocol.table_spec import TableSpec
from paceline.ps.protocol.wire import Head, Kind
from paceline.ps.server.dispatch import Handler
from paceline.ps.server.save_root import SaveRoot
from paceline.ps.state.store import Store
from paceline.ps.storage.durable import Durable
from paceline.ps.storage.journal import Journal, has_records, read_journal
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


def read(path: Path, may_be_torn: bool = True) -> list[list[bytes]]:
    return [[bytes(frame) for frame in frames] for frames in read_journal(path, 3, may_be_torn)]


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


def test_any_changed_byte_is_damage(tmp_path: Path) -> None:
    """In the last record too, which was perhaps acknowledged: nothing is cut off."""
    path = tmp_path / "journal"
    write(path)
    whole = path.read_bytes()
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 0x55
        path.write_bytes(changed)
        with pytest.raises(ServerStateError):
            read(path)
        assert path.read_bytes() == changed


@pytest.mark.parametrize("lost", [slice(1024, 1536), slice(1536, None), slice(512, 2048)])
def test_a_sector_that_was_never_written(lost: slice, tmp_path: Path) -> None:
    """The machine stopped: the file has its length, and zeros where the disk was not yet."""
    path = tmp_path / "journal"
    journal = Journal(path, 3, fsync=False)
    journal.append([b"one"])
    kept = path.stat().st_size
    journal.append([b"x" * 2000])
    journal.close()
    data = bytearray(path.read_bytes())
    data[lost] = bytes(len(data[lost]))
    path.write_bytes(data)
    assert read(path) == [[b"one"]]
    assert path.stat().st_size == kept


def test_zeros_at_the_end_are_a_crash_of_the_machine(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path)
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(bytes(10_000))
    assert read(path) == RECORDS
    assert path.stat().st_size == size


def test_a_machine_that_stopped_may_leave_a_head_of_zeros(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(bytes(5000))
    assert not has_records(path)
    assert read(path) == []
    write(path)
    assert has_records(path)
    assert read(path) == RECORDS


def test_only_the_last_journal_may_be_torn(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ServerStateError, match="damaged at byte"):
        read(path, may_be_torn=False)


def test_a_full_disk_ends_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is applied or acknowledged that is not in the journal."""
    spec = TableSpec("t", 10, 4)
    store = Store(1 << 20, 1 << 20)
    durable = Durable(tmp_path, store, fsync=False)
    handler = Handler(store, durable, SaveRoot(None))
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
