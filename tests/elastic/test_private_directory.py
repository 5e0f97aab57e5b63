"""A launcher's directory: nobody else enters it, and one that was left is removed."""

from __future__ import annotations

import os
import selectors
import shutil
import socket
import stat
import tempfile
from dataclasses import replace
from multiprocessing import util
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import pytest

from paceline.elastic.hosts import private_directory
from paceline.elastic.hosts.agent import Agent, AgentPlan, Launcher
from paceline.elastic.hosts.private_directory import PrivateDirectory, remove_left
from paceline.elastic.hosts.tunnel import StoreOrder, run_store
from paceline.elastic.member_process import use_private_folder
from paceline.elastic.protocol import DIRECTORY, MEMBER, coordinator_path
from paceline.launch.fork_server import shared_fork_server
from paceline.launch.wire import EndPolicy
from tests.children import child_process

pytestmark = pytest.mark.usefixtures("warm_fork_server")
HANG_S = 60.0


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def make_and_wait(pipe: Connection, where: str) -> None:
    tempfile.tempdir = where
    os.umask(0)
    found = PrivateDirectory()
    (found.path / "key").write_text("secret")
    pipe.send(str(found.path))
    pipe.recv()


def test_one_that_was_left_is_removed_and_one_in_use_is_not(tmp_path: Path) -> None:
    with child_process(make_and_wait, str(tmp_path)) as child:
        left = Path(child.pipe.recv())
        assert stat.S_IMODE(left.stat().st_mode) == 0o700
        other = PrivateDirectory()
        assert (left / "key").exists()
        child.kill()
        child.wait()
        assert (left / "key").exists()
        third = PrivateDirectory()
        assert not left.exists()
        assert other.path.exists()
        for each in (other, third):
            each.close()
            each.close()
            assert not each.path.exists()


def test_the_stores_of_a_killed_launcher_remove_it(tmp_path: Path) -> None:
    order = StoreOrder(is_first=True, has_others=False, key=b"k" * 64, directory="")
    with child_process(make_and_wait, str(tmp_path)) as launcher:
        left = Path(launcher.pipe.recv())
        stores = shared_fork_server().fork(EndPolicy(first=None, grace_s=HANG_S))
        stores.run(run_store, replace(order, directory=str(left)))
        assert stores.pipe.recv_bytes()
        launcher.kill()
        stores.pipe.close()  # as the kernel does
        assert stores.wait(HANG_S) == 0
        stores.close()
    assert not left.exists()


def test_that_of_a_launcher_that_lives_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_directory, "_TRIES", 3)
    made = PrivateDirectory()
    remove_left(made.path)
    assert made.path.exists()
    made.close()
    remove_left(made.path)


def test_no_other_directory_is_removed(tmp_path: Path) -> None:
    (tmp_path / "owner").touch()
    remove_left(tmp_path)
    assert tmp_path.exists()


def temporary_folder_of(pipe: Connection, environ: dict[str, str]) -> None:
    use_private_folder(environ)
    pipe.send(util.get_temp_dir())


def test_what_multiprocessing_keeps_for_a_member_is_gone_with_its_process() -> None:
    """It would be left in the temporary folder: one for each rank that is killed."""
    with selectors.DefaultSelector() as selector:
        agent = Agent(AgentPlan(0, 1, 1), mock.Mock(Launcher), selector)
        environ = {DIRECTORY: str(agent.directory), MEMBER: "3"}
        with child_process(temporary_folder_of, environ) as member:
            made = Path(member.pipe.recv())
        assert made.parent == agent.directory
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
        agent.on_exit(3, "it was killed", is_quiet=False)
        assert not made.exists()
        agent.close()


def test_one_that_is_being_made_is_left_alone(tmp_path: Path) -> None:
    made = tmp_path / "paceline-elastic-young"
    made.mkdir()
    (made / "owner.new").touch()
    (tmp_path / "paceline-elastic-link").symlink_to(made)
    PrivateDirectory().close()
    assert made.exists()


def test_a_file_that_is_made_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    made = PrivateDirectory()
    rmtree = shutil.rmtree
    late = [made.path / "late", made.path / "later"]

    def remove(path: Path, **options: bool) -> None:
        if late:
            path.mkdir(exist_ok=True)
            late.pop().touch()
            return
        rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", remove)
    made.close()
    assert not made.path.exists()


def test_a_temporary_folder_that_is_too_deep_for_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 80)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    made = PrivateDirectory()
    try:
        assert made.path.parent == Path("/tmp")
        assert stat.S_IMODE(made.path.stat().st_mode) == 0o700
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(str(coordinator_path(made.path)))
    finally:
        made.close()
