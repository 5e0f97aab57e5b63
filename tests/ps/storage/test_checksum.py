"""Snapshots and saves have a checksum: no changed byte gets into a table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.errors import ServerStateError
from paceline.ps.protocol.table_spec import TableSpec
from paceline.ps.state.refusal import Refusal
from paceline.ps.state.store import Store
from paceline.ps.storage.load import find_save
from paceline.ps.storage.save import save_job
from paceline.ps.storage.snapshot import read_snapshot, write_snapshot
from paceline.ps.storage.tensor_file import (
    CHECKSUM,
    Stream,
    has_checksum,
    open_tensors,
    write_tensors,
)
from tests.ps.raw_client import WHOLE

SPEC = TableSpec("t", 100, 4)


def filled() -> Store:
    store = Store(1 << 20, 1 << 20)
    table = store.create(SPEC, WHOLE)
    ids = torch.arange(5).numpy()
    table.push(ids, table.locate(ids), torch.ones(5, 4), 0.5)
    return store


def test_any_changed_byte_of_a_snapshot_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "s"
    write_snapshot(path, filled())
    whole = path.read_bytes()
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 0x15
        path.write_bytes(changed)
        with pytest.raises(ServerStateError, match="s cannot be read"):
            read_snapshot(path, Store(1 << 20, 1 << 20))
    path.write_bytes(whole)
    read_snapshot(path, Store(1 << 20, 1 << 20))


def test_any_changed_byte_of_a_save_is_seen(tmp_path: Path) -> None:
    store = filled()
    (name,) = save_job(store, tmp_path, "0" * 16)()["files"]
    whole = (tmp_path / name).read_bytes()
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 0x15
        (tmp_path / name).write_bytes(changed)
        with pytest.raises(Refusal, match="cannot be loaded"):
            find_save(store, tmp_path)
    (tmp_path / name).write_bytes(whole)
    find_save(store, tmp_path)


@pytest.mark.parametrize("cut", [1, 100, 500])
def test_a_cut_file(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "s"
    write_snapshot(path, filled())
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(ServerStateError, match="checksum"):
        read_snapshot(path, Store(1 << 20, 1 << 20))


def test_a_new_file_must_have_one(tmp_path: Path) -> None:
    path = tmp_path / "s"
    write_snapshot(path, filled())
    with open_tensors(path) as file:
        metadata = {name: text for name, text in file.metadata.items() if name != CHECKSUM}
    save_file(load_file(path), path, metadata)
    with pytest.raises(ServerStateError, match="checksum is missing"):
        read_snapshot(path, Store(1 << 20, 1 << 20))


def test_a_stream_is_as_long_as_it_says(tmp_path: Path) -> None:
    pieces = [torch.ones(2, 3), torch.zeros(1, 3)]
    write_tensors(tmp_path / "s", {"x": Stream(torch.float32, (3, 3), pieces)}, {})
    assert has_checksum(tmp_path / "s")
    assert torch.equal(load_file(tmp_path / "s")["x"], torch.cat(pieces))
    with pytest.raises(ValueError, match="x has 36 bytes, not 48"):
        write_tensors(tmp_path / "t", {"x": Stream(torch.float32, (4, 3), pieces)}, {})
    assert not (tmp_path / "t").exists()


def test_a_name_that_looks_like_one(tmp_path: Path) -> None:
    """The text of the checksum's entry, in other entries and in a tensor's name."""
    trap = '"crc32": "00000000'
    write_tensors(tmp_path / "s", {trap: torch.zeros(2)}, {"a": trap, "b": json.dumps(trap)})
    assert has_checksum(tmp_path / "s")
