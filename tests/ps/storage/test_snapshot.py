"""A store in a file, and back: every table, every bit of state, every client."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from paceline import ps
from paceline.errors import ServerStateError
from paceline.ps.protocol.table_spec import Shard, Sharding, TableSpec
from paceline.ps.protocol.wire import Dtype
from paceline.ps.state.clients import Client
from paceline.ps.state.refusal import Code, Refusal
from paceline.ps.state.store import Store
from paceline.ps.storage.snapshot import read_snapshot, write_snapshot
from paceline.ps.storage.tensor_file import open_tensors, write_tensors

OPTIMIZERS = [ps.SGD(), ps.Adagrad(), ps.RowwiseAdagrad(), ps.Adam()]


def filled() -> Store:
    store = Store(1 << 30, 1 << 30)
    for number, dtype in enumerate(Dtype):
        spec = TableSpec(f"t{number}", 1000, 5, dtype, OPTIMIZERS[number])
        table = store.create(spec, Shard(Sharding.RANGE, 1, 4))
        ids = np.array([499, 250, 300])
        grad = torch.randn(3, 5).to(table.dtype)
        for _ in range(3):
            table.push(ids, table.locate(ids), grad, 0.1)
    store.create(TableSpec("empty", 10, 2), Shard(Sharding.TABLE, 0, 1))
    store.clients.restore(Client(b"a" * 16, 7))
    refusal = Refusal(Code.ID, "no", table="t", id=3)
    store.clients.restore(Client(b"b" * 16, 9, {8: refusal}))
    return store


def test_round_trip(tmp_path: Path) -> None:
    before, after = filled(), Store(1 << 30, 1 << 30)
    write_snapshot(tmp_path / "s", before)
    read_snapshot(tmp_path / "s", after)
    for old, new in zip(before.tables, after.tables, strict=True):
        for fact in ("spec", "shard", "step", "count"):
            assert getattr(old, fact) == getattr(new, fact)
        if old.count:
            assert np.array_equal(old.storage.ids(), new.storage.ids())
            for left, right in zip(old.storage.kept(), new.storage.kept(), strict=True):
                assert torch.equal(left, right)
                assert left.dtype == right.dtype
    assert after.budget.used_bytes == before.budget.used_bytes > 0
    assert [name for name, _ in after.clients.items()] == [b"a" * 16, b"b" * 16]
    assert after.clients.applied(b"a" * 16) == 7
    refusals = after.clients.items()[1][1].refusals
    assert refusals is not None
    assert refusals[8].to_json() == {"code": "id", "text": "no", "table": "t", "id": 3}


def test_more_than_is_allowed_now(tmp_path: Path) -> None:
    write_snapshot(tmp_path / "s", filled())
    with pytest.raises(ServerStateError, match="--max-bytes is 100"):
        read_snapshot(tmp_path / "s", Store(100, 100))


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        ({"format": "else"}, "no paceline-ps-snapshot but else"),
        ({"format": "paceline-ps-snapshot", "version": "3"}, "of version 3"),
        ({"format": "paceline-ps-snapshot", "version": "2"}, "cannot be read"),
    ],
)
def test_another_file(tmp_path: Path, metadata: dict[str, str], match: str) -> None:
    write_tensors(tmp_path / "s", {"x": torch.zeros(2)}, metadata)
    with pytest.raises(ServerStateError, match=match):
        read_snapshot(tmp_path / "s", Store(1, 1))


def test_a_file_appears_complete_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tensors(tmp_path / "s", {"x": torch.arange(4)}, {"n": "1"})
    monkeypatch.setattr("paceline.ps.storage.files.write_all", fail_late)
    with pytest.raises(RuntimeError, match="fell off"):
        write_tensors(tmp_path / "s", {"x": torch.arange(9)}, {"n": "2"})
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    with open_tensors(tmp_path / "s") as file:
        assert file.metadata["n"] == "1"
        assert file.whole("x").tolist() == [0, 1, 2, 3]
        assert file.lines("x", 1, 3).tolist() == [1, 2]


def fail_late(descriptor: int, data: bytes) -> None:
    raise RuntimeError("the disk fell off")
