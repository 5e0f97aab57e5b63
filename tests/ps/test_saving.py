"""SAVE and LOAD: the same rows and optimizer state, on any number of servers, cut in any way."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from paceline import ps
from paceline.ps.refusal import Code, Refusal
from paceline.ps.saving import SavePlace, prepare_load, save_job
from paceline.ps.sharding import owners
from paceline.ps.spec import Shard, Sharding, TableSpec
from paceline.ps.store import Store
from paceline.ps.table import Table
from paceline.ps.wire import Kind, pack_control
from tests.ps.raw_client import RawClient, rows_frames

ROWS, DIM = 97, 6
LAYOUTS = {
    "whole": (Sharding.TABLE, 1),
    "hash-2": (Sharding.HASH, 2),
    "hash-5": (Sharding.HASH, 5),
    "range-3": (Sharding.RANGE, 3),
}
SPEC = TableSpec("a/b ü", ROWS, DIM, optimizer=ps.Adam(0.1))


def cluster(spec: TableSpec, layout: str) -> list[Store]:
    sharding, count = LAYOUTS[layout]
    stores = [Store(1 << 30, 1 << 30) for _ in range(count)]
    for index, store in enumerate(stores):
        store.create(spec, Shard(sharding, index, count))
    return stores


def mine(table: Table, ids: np.ndarray) -> np.ndarray:
    shard = table.shard
    return owners(shard.sharding, ROWS, shard.count, ids) == shard.index


def train(stores: list[Store], seed: int) -> None:
    chance = np.random.default_rng(seed)
    ids = np.sort(chance.choice(ROWS, 40, replace=False))
    grad = torch.from_numpy(chance.normal(size=(40, DIM))).float()
    for store in stores:
        (table,) = store.tables
        here = mine(table, ids)
        table.push(ids[here], table.locate(ids[here]), grad[torch.from_numpy(here)], 0.1)


def rows(stores: list[Store]) -> torch.Tensor:
    found = torch.full((ROWS, DIM), torch.nan)
    for store in stores:
        (table,) = store.tables
        ids = np.arange(ROWS)[mine(table, np.arange(ROWS))]
        raw = np.empty(len(ids), table.raw_dtype)
        table.read(ids, table.locate(ids), raw)
        found[torch.from_numpy(ids)] = torch.frombuffer(raw, dtype=table.dtype).view(-1, DIM)
    return found


@pytest.mark.parametrize("after", LAYOUTS)
@pytest.mark.parametrize("before", LAYOUTS)
def test_reshard(before: str, after: str, tmp_path: Path) -> None:
    """Training goes on after a load as if nothing had been, Adam's step and means included."""
    old, new = cluster(SPEC, before), cluster(SPEC, after)
    for seed in range(3):
        train(old, seed)
    for store in old:
        save_job(store, tmp_path)()
    train(new, 99)  # is overwritten
    for store in new:
        prepare_load(store, tmp_path)()
    assert torch.equal(rows(new), rows(old))
    train(old, 7)
    train(new, 7)
    assert torch.equal(rows(new), rows(old))
    assert sum(s.tables[0].count for s in new) == sum(s.tables[0].count for s in old)


def test_files_are_plain_safetensors(tmp_path: Path) -> None:
    (store,) = cluster(SPEC, "whole")
    train([store], 0)
    named = save_job(store, tmp_path)()["files"]
    tensors = load_file(tmp_path / named[0])
    assert set(tensors) == {"ids", "rows", "state.exp_avg", "state.exp_avg_sq"}
    assert torch.equal(tensors["rows"], rows([store])[tensors["ids"]])
    (manifest,) = tmp_path.glob("manifest-*.json")
    assert [entry["file"] for entry in json.loads(manifest.read_text())["files"]] == named
    assert os.stat(tmp_path / named[0]).st_mode & 0o077 == 0
    assert not list(tmp_path.glob("*.partial"))


def test_an_empty_table_is_saved_too(tmp_path: Path) -> None:
    (store,) = cluster(SPEC, "whole")
    save_job(store, tmp_path)()
    train([store], 0)
    prepare_load(store, tmp_path)()
    assert store.tables[0].count == 0
    assert store.tables[0].step == 0


def refusal_of(store: Store, directory: Path) -> str:
    with pytest.raises(Refusal) as caught:
        prepare_load(store, directory)
    assert caught.value.code is Code.LOAD
    return caught.value.text


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    old = cluster(SPEC, "hash-2")
    train(old, 0)
    assert "there is no table 'a/b ü'" in refusal_of(old[0], tmp_path)
    first, second = (tmp_path / save_job(store, tmp_path)()["files"][0] for store in old)
    before = rows(old)
    whole = second.read_bytes()
    second.write_bytes(whole[:-8])
    assert f"{second.name} is no complete safetensors file" in refusal_of(old[0], tmp_path)
    second.unlink()
    assert "shard 1 of 2 is missing" in refusal_of(old[0], tmp_path)
    second.write_bytes(whole.replace(b'"version": "1"', b'"version": "9"'))
    assert "is of version 9" in refusal_of(old[0], tmp_path)
    second.write_bytes(whole)
    other = TableSpec(SPEC.name, ROWS, DIM + 1, optimizer=ps.Adam())
    assert "was saved as" in refusal_of(cluster(other, "whole")[0], tmp_path)
    for store in cluster(SPEC, "range-3")[:1]:
        save_job(store, tmp_path)()
    assert "from several saves" in refusal_of(old[0], tmp_path)
    assert torch.equal(rows(old), before), "nothing has changed"
    assert first.exists()


@pytest.mark.parametrize("path", ["../elsewhere", "/etc", "a/../../b", "", "x\0y", 7, "link/x"])
def test_only_below_the_root(path: object, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(tmp_path)
    with pytest.raises(Refusal):
        SavePlace(root, is_open=False).directory({"path": path}, Code.SAVE)
    assert SavePlace(root, is_open=False).directory({"path": "a"}, Code.SAVE) == root / "a"


def test_tcp_without_a_root_saves_nowhere() -> None:
    with pytest.raises(Refusal, match="--save-root"):
        SavePlace(None, is_open=False).directory({"path": "/tmp/x"}, Code.SAVE)
    with pytest.raises(Refusal, match="no absolute path"):
        SavePlace(None, is_open=True).directory({"path": "x"}, Code.SAVE)


def test_save_while_training_goes_on(
    start_servers: Callable[..., ps.LocalServers], tmp_path: Path
) -> None:
    """The file is of one moment, pushes are answered before it is there; LOAD brings it back."""
    spec = TableSpec("t", 100_000, 64)
    servers = start_servers(1, directory=tmp_path / "state")
    with RawClient(servers.addresses[0]) as client:
        client.attach(spec)
        ids = list(range(20_000))
        client.write(0, spec, ids, torch.zeros(len(ids), 64))
        save = client.head(Kind.SAVE)
        client.socket.send_multipart(pack_control(save, {"path": str(tmp_path / "saved")}))
        pushed, answered = 0, 0
        while answered != save.request:
            head = client.next_head(Kind.PUSH)
            one = torch.full((1, 64), -1.0)
            answered = client.ask(rows_frames(head, [(0, spec, [1], one, 1.0)])).head.request
            pushed += 1
        client.receive()  # of the push that was answered behind the save
        assert client.lookup(0, spec, [1])[0, 0] == pushed
        client.sequence += 1
        done = client.control(Kind.LOAD, {"path": str(tmp_path / "saved")}, client.sequence)
        assert done.control == {"rows": 20_000}
        saved = client.lookup(0, spec, [1])[0, 0]
        assert saved == 0
        servers.kill(0)
        servers.restart(0)
        assert client.lookup(0, spec, [1])[0, 0] == saved, "a load survives, too"
        assert client.hello()["applied"] == client.sequence


def test_disk_that_does_not_want_to(
    start_servers: Callable[..., ps.LocalServers], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    servers = start_servers(1)
    with RawClient(servers.addresses[0]) as client:
        answer = client.control(Kind.SAVE, {"path": str(tmp_path / "file" / "x")})
        assert answer.control["code"] == "save"
        assert "NotADirectoryError" in answer.control["text"]
        assert client.hello()["applied"] == 0
