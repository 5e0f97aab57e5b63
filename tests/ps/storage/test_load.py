"""LOAD: all or nothing, on each server and on all of them, whatever does not fit."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import ps
from paceline.errors import ServerRefusedError, ServerStateError
from paceline.ps.client import control as asking
from paceline.ps.protocol.settings import ServerSettings
from paceline.ps.protocol.table_spec import TableSpec
from paceline.ps.protocol.wire import Head, Kind, pack_control
from paceline.ps.state.store import Store
from paceline.ps.storage import durable
from tests.ps.killed_durable import close_as_killed
from tests.ps.patient_client import SPEC, PatientClient
from tests.ps.raw_client import RawClient
from tests.ps.storage.disk_story import CLIENT, LOADED, STORY, Act, Player, Scene, make_save
from tests.ps.storage.full_disk import running, small_file_system

Start = Callable[..., ps.LocalServers]
ROW_BYTES = 4 * SPEC.dim + 12
MANY, FEW = list(range(500)), [1, 5, 999]


def saved(start_servers: Start, path: Path, ids: list[int], value: float) -> Path:
    """A save in which these rows have this value."""
    servers = start_servers(1)
    with RawClient(servers.addresses[0]) as client:
        client.attach(SPEC)
        client.write(0, SPEC, ids, torch.full((len(ids), SPEC.dim), value))
        assert client.control(Kind.SAVE, {"path": str(path)}).head.kind is Kind.DONE
    servers.close()
    return path


def load(client: RawClient, path: Path) -> tuple[str, str]:
    """The answer's code, and its text."""
    answer = client.ask(pack_control(client.next_head(Kind.LOAD), {"path": str(path)}))
    return answer.control.get("code", ""), answer.control.get("text", "")


def is_all(client: PatientClient, ids: list[int], value: float) -> bool:
    return torch.equal(client.values(ids), torch.full((len(ids), SPEC.dim), value))


@pytest.mark.parametrize("is_durable", [True, False], ids=["durable", "memory"])
def test_more_than_max_bytes(start_servers: Start, is_durable: bool, tmp_path: Path) -> None:
    """The trained rows are still there, live and after a restart; the text has the numbers."""
    path = saved(start_servers, tmp_path / "saved", MANY, 7.0)
    directory = tmp_path / "state" if is_durable else None
    servers = start_servers(1, directory=directory, max_bytes=100 * ROW_BYTES)
    with PatientClient(servers.addresses[0]) as client:
        client.attach_patiently()
        client.write_zeros(FEW)
        client.add_one(FEW)
        code, text = load(client, path)
        assert code == "size"
        for part in ("table 'sums'", f"{500 * ROW_BYTES} bytes", "500 rows", "--max-bytes is 2800"):
            assert part in text
        assert "Nothing was changed" in text
        assert is_all(client, FEW, 1.0)
        client.add_one(FEW)
        assert is_all(client, FEW, 2.0)
        if is_durable:
            servers.kill(0)
            servers.restart(0)
            assert is_all(client, FEW, 2.0)
            client.add_one(FEW)
            assert is_all(client, FEW, 3.0)


@pytest.mark.usefixtures("fork_server")
def test_a_disk_without_room(start_servers: Start, tmp_path: Path) -> None:
    """Nothing is loaded, the server goes on, and has every push after a SIGKILL."""
    path = saved(start_servers, tmp_path / "saved", list(range(1000)), 7.0)
    disk = tmp_path / "disk"
    settings = ServerSettings(
        f"ipc://{tmp_path / 'socket'}",
        disk / "state",
        snapshot_every_s=0.0,
        save_root=tmp_path,
    )
    with small_file_system(disk, 32 << 10), PatientClient(settings.address) as client:
        with running(settings):
            client.attach_patiently()
            client.write_zeros(FEW)
            client.add_one(FEW)
            code, text = load(client, path)
            assert code == "load"
            assert "No space left" in text
            assert "Nothing was changed" in text
            assert is_all(client, FEW, 1.0)
            for _ in range(20):
                client.add_one(FEW)
        with running(settings):
            assert is_all(client, FEW, 21.0)
            client.add_one(FEW)
            assert is_all(client, FEW, 22.0)
            assert client.hello()["applied"] == client.sequence


def test_is_for_good(start_servers: Start, tmp_path: Path) -> None:
    """Killed afterwards, the server has what was loaded and pushed, though the save is gone."""
    path = saved(start_servers, tmp_path / "saved", MANY, 7.0)
    servers = start_servers(1, directory=tmp_path / "state")
    with PatientClient(servers.addresses[0]) as client:
        client.attach_patiently()
        client.write_zeros(FEW)
        assert load(client, path) == ("", "")
        shutil.rmtree(path)
        client.add_one(FEW[:2])
        for _ in range(2):
            assert is_all(client, FEW[:2], 8.0)
            assert is_all(client, MANY[10:], 7.0)
            servers.kill(0)
            servers.restart(0)
    servers.close()
    left = {path.name.partition("-")[0] for path in (tmp_path / "state" / "0").iterdir()}
    assert left == {"lock", "journal", "snapshot"}, "a snapshot supersedes it"


def test_what_was_staged_is_loaded(start_servers: Start, tmp_path: Path) -> None:
    path = saved(start_servers, tmp_path / "saved", MANY, 7.0)
    servers = start_servers(1, directory=tmp_path / "state")
    with PatientClient(servers.addresses[0]) as client:
        client.attach_patiently()
        client.write_zeros(FEW)
        staged = client.control(Kind.STAGE, {"path": str(path)}).control
        assert staged["rows"] == 500
        client.add_one(FEW)
        assert is_all(client, FEW, 1.0), "nothing has changed"
        control = {"path": str(path), "staged": staged["staged"]}
        shutil.rmtree(path)
        client.deliver(pack_control(client.next_head(Kind.LOAD), control))
        assert is_all(client, FEW[:2], 7.0)


def test_a_restart_between_the_steps(start_servers: Start, tmp_path: Path) -> None:
    path = saved(start_servers, tmp_path / "saved", MANY, 7.0)
    servers = start_servers(1, directory=tmp_path / "state")
    with PatientClient(servers.addresses[0]) as client:
        client.attach_patiently()
        staged = client.control(Kind.STAGE, {"path": str(path)}).control["staged"]
        servers.kill(0)
        servers.restart(0)
        assert not list((tmp_path / "state" / "0").glob("staged-*"))
        control = {"path": str(path), "staged": staged}
        client.deliver(pack_control(client.next_head(Kind.LOAD), control))
        assert is_all(client, MANY, 7.0)


def test_what_is_loaded_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the journal: the server ends, and the next one has it."""
    scene = Scene(tmp_path / "root", make_save(tmp_path / "saved"), fsync=False)
    scene.root.mkdir()
    player = Player(scene)
    for act in (Act.ATTACH_A, Act.ATTACH_B, Act.ZERO):
        player.do(STORY.index(act))

    def broken(path: Path, store: Store) -> int:
        store.tables[0].clear()
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(durable, "read_loaded", broken)
    load = pack_control(Head(Kind.LOAD, 1, CLIENT, 4), {"path": str(scene.saved)})
    with pytest.raises(ServerStateError, match=r"cannot be read: .*Input/output error"):
        player.handler.answer(load)
    close_as_killed(player.durable)
    with pytest.raises(ServerStateError, match="cannot be read"):
        Player(scene)
    monkeypatch.undo()
    again = Player(scene)
    assert again.store.clients.applied(CLIENT) == 4
    for table in again.store.tables:
        assert table.storage.kept()[0].unique().tolist() == [LOADED]
    (loaded,) = scene.state.glob("loaded-*")
    close_as_killed(again.durable)
    loaded.unlink()
    with pytest.raises(ServerStateError, match=r"loaded-.* was loaded before .*; put it back"):
        Player(scene)


@pytest.mark.parametrize("token", ["../../x", "", 7, "0" * 15 + "/", "0" * 17])
def test_a_token_is_no_path(start_servers: Start, token: object, tmp_path: Path) -> None:
    servers = start_servers(1, directory=tmp_path / "state")
    with PatientClient(servers.addresses[0]) as client:
        client.attach_patiently()
        answer = client.control(Kind.STAGE, {"forget": token}).control
        assert "16 hexadecimal digits" in answer["text"]


def table(servers: ps.Servers) -> ps.Embedding:
    return ps.Embedding(1000, 4, servers=servers, name="sums", sharding="range")


def write(servers: ps.Servers, ids: list[int], value: float) -> None:
    table(servers).write(torch.tensor(ids), torch.full((len(ids), 4), value))


def rows(servers: ps.Servers, ids: list[int]) -> set[float]:
    return set(table(servers).rows(torch.tensor(ids)).flatten().tolist())


@pytest.fixture
def two(start_servers: Start, tmp_path: Path) -> Callable[[bool, int], ps.LocalServers]:
    """Two servers, and a save in which all rows but few are the first one's."""
    with ps.connect(start_servers(2)) as servers:
        write(servers, [*MANY, 999], 7.0)
        servers.save(tmp_path / "saved")
    return lambda is_durable, max_rows: start_servers(
        2, directory=tmp_path / "state" if is_durable else None, max_bytes=max_rows * ROW_BYTES
    )


@pytest.mark.parametrize("is_durable", [True, False], ids=["durable", "memory"])
def test_one_server_cannot(
    two: Callable[[bool, int], ps.LocalServers], is_durable: bool, tmp_path: Path
) -> None:
    """Then none has loaded anything, and nothing is left on any disk."""
    with ps.connect(two(is_durable, 100)) as servers:
        write(servers, FEW, 1.0)
        with pytest.raises(ServerRefusedError, match="No server has loaded anything") as caught:
            servers.load(tmp_path / "saved")
        assert caught.value.server == 0
        assert caught.value.code == "size"
        assert caught.value.table == "sums"
        assert rows(servers, FEW) == {1.0}
    staged = list((tmp_path / "state").glob("*/staged-*"))
    assert not staged


@pytest.mark.parametrize("is_durable", [True, False], ids=["durable", "memory"])
def test_one_server_fails_after_all_were_ready(
    two: Callable[[bool, int], ps.LocalServers],
    is_durable: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The text says who has loaded and who has not; each of them has all or nothing."""
    local = two(is_durable, 2000)
    ask_each = asking._ask_each

    def with_a_new_table(*arguments: Any) -> Any:
        found = ask_each(*arguments)
        if arguments[1] is Kind.STAGE:
            with RawClient(local.addresses[1]) as stranger:
                stranger.attach(TableSpec("new", 10, 4))
        return found

    monkeypatch.setattr(asking, "_ask_each", with_a_new_table)
    with ps.connect(local) as servers:
        write(servers, FEW, 1.0)
        text = r"no table 'new' in it.*have loaded: 0; that have not: 1\. Load again"
        with pytest.raises(ServerRefusedError, match=text):
            servers.load(tmp_path / "saved")
        assert rows(servers, [1, 5]) == {7.0}
        assert rows(servers, [999]) == {1.0}


def test_all_servers_load(two: Callable[[bool, int], ps.LocalServers], tmp_path: Path) -> None:
    with ps.connect(two(True, 2000)) as servers:
        write(servers, FEW, 1.0)
        servers.load(tmp_path / "saved")
        assert rows(servers, [*MANY, 999]) == {7.0}
