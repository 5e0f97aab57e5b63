"""SAVE and LOAD: the same rows and optimizer state, on any number of servers, cut in any way."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from paceline import ps
from paceline.ps.protocol.sharding import owners
from paceline.ps.protocol.table_spec import Shard, Sharding, TableSpec
from paceline.ps.protocol.wire import Kind, pack_control
from paceline.ps.server.save_root import SaveRoot
from paceline.ps.state.refusal import Code, Refusal
from paceline.ps.state.store import Store
from paceline.ps.state.table import Table
from paceline.ps.storage import save_files as saved
from paceline.ps.storage.load import build_aside, find_save
from paceline.ps.storage.save import save_job, tidy_job
from paceline.ps.storage.tensor_file import CHECKSUM, open_tensors, write_tensors
from tests.ps.raw_client import RawClient, rows_frames

ROWS, DIM = 97, 6
LAYOUTS = {
    "whole": (Sharding.TABLE, 1),
    "hash-2": (Sharding.HASH, 2),
    "hash-5": (Sharding.HASH, 5),
    "range-3": (Sharding.RANGE, 3),
}
ID = "0123456789abcdef"
SPEC = TableSpec("a/b ü", ROWS, DIM, optimizer=ps.Adam(0.1))


def cluster(spec: TableSpec, layout: str) -> list[Store]:
    sharding, count = LAYOUTS[layout]
    stores = [Store(1 << 30, 1 << 30) for _ in range(count)]
    for index, store in enumerate(stores):
        store.create(spec, Shard(sharding, index, count))
    return stores


def load(store: Store, directory: Path) -> None:
    build_aside(store, find_save(store, directory))()


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
        save_job(store, tmp_path, ID)()
    train(new, 99)  # is overwritten
    for store in new:
        load(store, tmp_path)
    assert torch.equal(rows(new), rows(old))
    train(old, 7)
    train(new, 7)
    assert torch.equal(rows(new), rows(old))
    assert sum(s.tables[0].count for s in new) == sum(s.tables[0].count for s in old)


def test_files_are_plain_safetensors(tmp_path: Path) -> None:
    (store,) = cluster(SPEC, "whole")
    train([store], 0)
    named = save_job(store, tmp_path, ID)()["files"]
    tensors = load_file(tmp_path / named[0])
    assert set(tensors) == {"ids", "rows", "state.exp_avg", "state.exp_avg_sq"}
    assert torch.equal(tensors["rows"], rows([store])[tensors["ids"]])
    (manifest,) = tmp_path.glob("manifest-*.json")
    assert [entry["file"] for entry in json.loads(manifest.read_text())["files"]] == named
    assert os.stat(tmp_path / named[0]).st_mode & 0o077 == 0
    assert not list(tmp_path.glob("*.partial"))


def test_an_empty_table_is_saved_too(tmp_path: Path) -> None:
    (store,) = cluster(SPEC, "whole")
    save_job(store, tmp_path, ID)()
    train([store], 0)
    load(store, tmp_path)
    assert store.tables[0].count == 0
    assert store.tables[0].step == 0


def refusal_of(store: Store, directory: Path) -> str:
    with pytest.raises(Refusal) as caught:
        find_save(store, directory)
    assert caught.value.code is Code.LOAD
    return caught.value.text


def rewrite(path: Path, **changes: str) -> None:
    """A file with other metadata, and the right checksum."""
    with open_tensors(path) as file:
        metadata = {name: text for name, text in file.metadata.items() if name != CHECKSUM}
        tensors = load_file(path)
    write_tensors(path, tensors, {**metadata, **changes})


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    old = cluster(SPEC, "hash-2")
    train(old, 0)
    assert "there is no manifest" in refusal_of(old[0], tmp_path)
    first, second = (tmp_path / save_job(store, tmp_path, ID)()["files"][0] for store in old)
    before = rows(old)
    whole = second.read_bytes()
    second.write_bytes(whole[:-8])
    assert f"{second.name} is damaged: its checksum says" in refusal_of(old[0], tmp_path)
    second.unlink()
    assert f"{second.name} is listed in a manifest, and missing" in refusal_of(old[0], tmp_path)
    second.write_bytes(whole)
    rewrite(second, version="9")
    assert "is of version 9" in refusal_of(old[0], tmp_path)
    second.write_bytes(whole)
    other = TableSpec(SPEC.name, ROWS, DIM + 1, optimizer=ps.Adam())
    assert "was saved as" in refusal_of(cluster(other, "whole")[0], tmp_path)
    new = TableSpec("new", ROWS, DIM)
    assert "there is no table 'new' in it" in refusal_of(cluster(new, "whole")[0], tmp_path)
    second.rename(tmp_path / "aside")
    second.write_bytes(first.read_bytes())
    assert f"{second.name} has shard 0: files were renamed" in refusal_of(old[0], tmp_path)
    (tmp_path / "aside").rename(second)
    for store in cluster(SPEC, "range-3")[:1]:
        save_job(store, tmp_path, ID)()
    assert "from several saves" in refusal_of(old[0], tmp_path)
    assert torch.equal(rows(old), before), "nothing has changed"
    assert first.exists()


def saved_value(store: Store, directory: Path) -> float:
    """The sum of this server's part of the last complete save; the store is not changed."""
    fresh = Store(1 << 30, 1 << 30)
    for table in store.tables:
        fresh.create(table.spec, table.shard)
    load(fresh, directory)
    return total(fresh)


def total(store: Store) -> float:
    return float(store.tables[0].storage.kept()[0].sum())


def test_a_save_that_is_not_complete_is_as_if_it_had_never_been(tmp_path: Path) -> None:
    """One of two servers has saved again: what both had saved before is loaded."""
    stores = cluster(SPEC, "hash-2")
    train(stores, 0)
    for store in stores:
        save_job(store, tmp_path, ID)()
    before = saved_value(stores[0], tmp_path)
    train(stores, 1)
    later = ID[::-1]
    save_job(stores[0], tmp_path, later)()
    with pytest.raises(ValueError, match="shard 1 of 2 is missing"):
        tidy_job(stores[0], tmp_path, later)()
    assert saved_value(stores[0], tmp_path) == before
    save_job(stores[1], tmp_path, later)()
    assert saved_value(stores[0], tmp_path) == total(stores[0]) != before
    (tmp_path / f"{next(tmp_path.glob('*0001-of-0002*')).name}.partial").touch()
    for store in stores:
        tidy_job(store, tmp_path, later)()
    assert len(list(tmp_path.iterdir())) == 4
    assert all(later in path.name for path in tmp_path.iterdir())
    assert saved_value(stores[0], tmp_path) == total(stores[0])


def test_the_last_save_is_meant_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (store,) = cluster(SPEC, "whole")
    train([store], 0)
    save_job(store, tmp_path, ID)()
    train([store], 1)
    monkeypatch.setattr("time.time", lambda: 1000.0)
    save_job(store, tmp_path, ID[::-1])()
    assert saved_value(store, tmp_path) == total(store)


def test_servers_tidy_up_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Manifests vanish while they are read."""
    (store,) = cluster(SPEC, "whole")
    train([store], 0)
    save_job(store, tmp_path, ID)()
    save_job(store, tmp_path, ID[::-1])()
    read, vanished = saved._read, []

    def read_late(path: Path) -> Mapping[str, Any]:
        if ID in path.name:
            path.unlink(missing_ok=True)
            vanished.append(path)
        return read(path)

    monkeypatch.setattr(saved, "_read", read_late)
    tidy_job(store, tmp_path, ID[::-1])()
    assert vanished
    assert saved_value(store, tmp_path) == total(store)


def test_an_older_save_that_cannot_be_deleted(
    start_servers: Callable[..., ps.LocalServers],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The new one is there all the same."""
    with ps.connect(start_servers(1)) as servers:
        table = ps.Embedding(10, 4, servers=servers, name="t")
        for value in (1.0, 2.0):
            table.write(torch.arange(10), torch.full((10, 4), value))
            (file,) = servers.save(tmp_path)
            stem = file.rsplit(".", 2)[0]
            (tmp_path / f"{stem}.in-the-way").mkdir(exist_ok=True)
        assert "an older save could not be deleted" in caplog.text
        table.write(torch.arange(10), torch.zeros(10, 4))
        servers.load(tmp_path)
        assert table.rows(torch.arange(10)).unique().tolist() == [2.0]


def test_one_manifest_too_many(tmp_path: Path) -> None:
    (store,) = cluster(SPEC, "whole")
    save_job(store, tmp_path, ID)()
    (tmp_path / "manifest-x.json").write_text("{}")
    assert "manifest-x.json is damaged" in refusal_of(store, tmp_path)


@pytest.mark.parametrize("path", ["../elsewhere", "/etc", "a/../../b", "", "x\0y", 7, "link/x"])
def test_only_below_the_root(path: object, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(tmp_path)
    with pytest.raises(Refusal):
        SaveRoot(root).directory({"path": path}, Code.SAVE)
    assert SaveRoot(root).directory({"path": "a"}, Code.SAVE) == root / "a"


def test_without_a_root_nothing_is_saved() -> None:
    for path in ("/tmp/x", "x"):
        with pytest.raises(Refusal, match="--save-root"):
            SaveRoot(None).directory({"path": path}, Code.SAVE)


def test_what_the_user_wrote_is_relative_to_the_root(tmp_path: Path) -> None:
    place = SaveRoot(tmp_path / "root")
    elsewhere = {"path": str(tmp_path / "home" / "a"), "relative": "a"}
    assert place.directory(elsewhere, Code.SAVE) == tmp_path / "root" / "a"
    inside = {"path": str(tmp_path / "root" / "b" / "a"), "relative": "a"}
    assert place.directory(inside, Code.SAVE) == tmp_path / "root" / "b" / "a"
    for relative in ("../a", "/etc", "", 7):
        with pytest.raises(Refusal):
            place.directory({**elsewhere, "relative": relative}, Code.LOAD)


def test_links_inside_a_save_do_not_lead_out(tmp_path: Path) -> None:
    inside, outside = tmp_path / "root" / "save", tmp_path / "outside"
    inside.mkdir(parents=True)
    outside.write_text("")
    (inside / "near").symlink_to(tmp_path / "root" / "other")
    assert SaveRoot(tmp_path / "root").directory({"path": "save"}, Code.LOAD) == inside
    (inside / "far").symlink_to(outside)
    with pytest.raises(Refusal, match="a link that leads out"):
        SaveRoot(tmp_path / "root").directory({"path": "save"}, Code.SAVE)


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
