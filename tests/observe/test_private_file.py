"""Files that only their user can read, and that are there whole or not at all."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.observe.private_file import open_private, whole_file, write_whole


@pytest.fixture(params=[0o000, 0o022, 0o277], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_only_the_owner_may_read_and_write(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", "first")
    write_whole(tmp_path / "a", "second \ud800")  # half of a character, which no file can hold
    assert (tmp_path / "a").read_text() == "second ?"
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["a"]


def test_nobody_reads_it_before_it_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mode is the kernel's from the first moment, not one that is set afterwards."""
    monkeypatch.setattr("os.fchmod", lambda *_: None)
    write_whole(tmp_path / "a", "")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600


def test_nobody_sees_half_of_it(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_whole(path, "before")
    with whole_file(path) as file:
        file.write("after")
        file.flush()
        assert path.read_text() == "before"
    assert path.read_text() == "after"

    def fail() -> None:
        with whole_file(path) as file:
            file.write("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_text() == "after"
    assert os.listdir(tmp_path) == ["a"]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "nowhere" / "a", "")


def test_a_link_leads_nowhere_and_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """PACELINE_RUN_DIR may be a folder that others can write into."""
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "failure.txt").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"):
        open_private(tmp_path / "failure.txt", os.O_APPEND)
    write_whole(tmp_path / "failure.txt", "who was it")  # takes the place of the link
    assert (tmp_path / "precious").read_text() == "precious"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="No such device"):
        open_private(tmp_path / "pipe", 0)
