"""Run folders: made for this user only, never taken from anybody, and found again."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.errors import ConfigurationError
from paceline.observe.masked import masked
from paceline.observe.run_folder import RunFolder, RunInfo, find_run, open_private, write_private

INFO = RunInfo("a", ("train.py",), 2, 1, 4242, 1000.0, {})


@pytest.fixture(params=[0o022, 0o277], ids=["usual umask", "umask of a madman"])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


class TestCreate:
    @pytest.mark.usefixtures("umask")
    def test_what_is_made_is_private(self, tmp_path: Path) -> None:
        folder = RunFolder.create("train.py", tmp_path / "run")
        folder.write_info(INFO)
        assert mode(folder.path) == 0o700
        assert mode(folder.path / "run.json") == 0o600
        assert folder.read_info() == INFO

    def test_an_empty_folder_becomes_private(self, tmp_path: Path) -> None:
        (tmp_path / "run").mkdir(mode=0o755)
        assert mode(RunFolder.create("train.py", tmp_path / "run").path) == 0o700

    @pytest.mark.parametrize("join", [False, True])
    def test_a_folder_of_others_stays_as_it_is(self, join: bool, tmp_path: Path) -> None:
        """As root, ``--run-dir /tmp`` must not take /tmp from everybody."""
        (tmp_path / "tmp").mkdir()
        (tmp_path / "tmp").chmod(0o1777)
        (tmp_path / "tmp" / "somebody's").touch()
        if join:
            RunFolder.create("train.py", tmp_path / "tmp", join=True)
        else:
            with pytest.raises(ConfigurationError, match="is not empty"):
                RunFolder.create("train.py", tmp_path / "tmp")
        assert mode(tmp_path / "tmp") == 0o1777
        assert [path.name for path in (tmp_path / "tmp").iterdir()] == ["somebody's"]

    @pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a folder away")
    def test_an_empty_folder_of_another_user(self, tmp_path: Path) -> None:
        (tmp_path / "theirs").mkdir(mode=0o755)
        os.chown(tmp_path / "theirs", 12345, 12345)
        with pytest.raises(ConfigurationError, match=r"another user \(uid 12345\)"):
            RunFolder.create("train.py", tmp_path / "theirs")
        assert mode(tmp_path / "theirs") == 0o755

    def test_one_of_many_runs_gets_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All of them find it empty before the first writes into it."""
        count = 8
        barrier, outcomes = threading.Barrier(count), list[str]()
        chmod = os.chmod

        def all_have_looked(*words: object) -> None:
            chmod(*words)  # type: ignore[arg-type]
            barrier.wait(60)

        def create() -> None:
            try:
                RunFolder.create("train.py", tmp_path / "run")
                outcomes.append("")
            except ConfigurationError as error:
                outcomes.append(str(error))

        (tmp_path / "run").mkdir()
        monkeypatch.setattr("os.chmod", all_have_looked)
        threads = [threading.Thread(target=create) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outcomes.count("") == 1
        others = [text for text in outcomes if text]
        assert all("belongs to another run" in text for text in others), others

    def test_the_second_of_two_runs(self, tmp_path: Path) -> None:
        RunFolder.create("train.py", tmp_path / "run")
        with pytest.raises(ConfigurationError, match="belongs to another run: name another"):
            RunFolder.create("train.py", tmp_path / "run")


@pytest.mark.usefixtures("umask")
def test_a_private_file(tmp_path: Path) -> None:
    write_private(tmp_path / "failure.txt", "who \udcff was it\n")
    assert mode(tmp_path / "failure.txt") == 0o600
    assert (tmp_path / "failure.txt").read_text() == "who ? was it\n"


def test_nobody_reads_it_before_it_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mode is the kernel's from the first moment, not one that is set afterwards."""
    monkeypatch.setattr("os.fchmod", lambda *_: None)
    write_private(tmp_path / "failure.txt", "")
    assert mode(tmp_path / "failure.txt") == 0o600


def test_a_link_leads_nowhere_and_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """PACELINE_RUN_DIR may be a folder that others can write into."""
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "failure.txt").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"):
        write_private(tmp_path / "failure.txt", "who was it")
    with pytest.raises(OSError, match="symbolic links"):
        open_private(tmp_path / "failure.txt", os.O_APPEND)
    assert (tmp_path / "precious").read_text() == "precious"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="No such device"):
        open_private(tmp_path / "pipe", 0)


class TestLatest:
    @pytest.fixture
    def runs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "paceline-runs").mkdir()
        return tmp_path / "paceline-runs"

    def add(self, runs: Path, name: str, began_s: float) -> Path:
        folder = RunFolder(runs / name)
        folder.path.mkdir()
        folder.write_info(RunInfo(name, (), 1, 1, 1, began_s, {}))
        return folder.path

    def test_the_run_that_began_last(self, runs: Path) -> None:
        """Not the one into which a report was written last."""
        for name, began_s in (("a", 100.0), ("b", 300.0), ("c", 200.0)):
            self.add(runs, name, began_s)
        (runs / "a" / "report.html").write_text("a report")
        assert find_run("latest").path.name == "b"
        assert find_run("a").path == Path("paceline-runs/a")

    def test_runs_of_another_launcher(self, runs: Path) -> None:
        """They have no run.json: the oldest of their files tells."""
        for name, at_s in (("theirs", 250.0), ("older", 150.0)):
            (runs / name).mkdir()
            (runs / name / "rank0.events").touch()
            os.utime(runs / name / "rank0.events", (at_s, at_s))
            (runs / name / "report.html").touch()
        self.add(runs, "a", 200.0)
        assert find_run("latest").path.name == "theirs"

    def test_what_is_no_run(self, runs: Path) -> None:
        (runs / "notes").mkdir()
        (runs / "notes" / "todo.txt").touch()
        with pytest.raises(ConfigurationError, match="there is no run in paceline-runs"):
            find_run("latest")
        self.add(runs, "a", 1.0)
        assert find_run("latest").path.name == "a"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("train.py --api-key X --lr 0.1", "train.py --api-key *** --lr 0.1"),
        ("train.py --api-key=X=Y --lr=0.1", "train.py --api-key=*** --lr=0.1"),
        ("train.py -password X", "train.py -password ***"),
        ("train.py --HF_TOKEN X wandb.api_key=X", "train.py --HF_TOKEN *** wandb.api_key=***"),
        ("env CLIENT_SECRET=X prog", "env CLIENT_SECRET=*** prog"),
        ("train.py --use-key --epochs 3", "train.py --use-key --epochs 3"),
        ("train.py --api-key= --lr 1", "train.py --api-key= --lr 1"),
        ("train.py --max-tokens 512 --tokens=8", "train.py --max-tokens 512 --tokens=8"),
        ("train.py --tokens X", "train.py --tokens ***"),
        ("train.py --tokenizer bert", "train.py --tokenizer bert"),
        ("train.py data/key=3/x --lr 1", "train.py data/key=3/x --lr 1"),
        ("monkey.py 3", "monkey.py 3"),
    ],
)
def test_secrets_are_masked(words: str, shown: str) -> None:
    assert masked(words.split()) == tuple(shown.split())
