"""Options of ``paceline run`` that say where hosts meet, how many ranks, and what is stored."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.cli.run import _ranks, add_arguments, make_plan
from paceline.elastic import member_process, protocol
from paceline.launch.environment import OF_A_MEMBER, job_environ
from paceline.launch.rendezvous import UNNUMBERED
from paceline.observe.run_folder import RECORD_AS
from paceline.observe.stall.start import MIN_STALL_S, read_stall_after
from tests.cli.launched import launch

TWO = ["--nnodes", "2"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--rdzv-endpoint", "n:1", "--master-addr", "n"], "say the same: give one"),
        (["--rdzv-endpoint", "n:1", "--master-port", "1"], "say the same: give one"),
        (["--master-addr", "n:1", "--master-port", "2"], "has a port, and there is --master-port"),
        (["--master-port", "65536"], "--master-port is a number from 1 to 65535; not 65536"),
        (["--master-port", "-1"], "--master-port is a number from 1 to 65535; not -1"),
        ([*TWO, "--master-addr", "n", "--master-port", "0"], "from 1 to 65535; not 0"),
        (["--rdzv-endpoint", "n:65536"], "with a port from 1 to 65535; not n:65536"),
        (["--rdzv-endpoint", "n:"], "--rdzv-endpoint is HOST:PORT"),
        ([*TWO, "--rdzv-endpoint", "n:0"], "with a port from 1 to 65535; not n:0"),
        (["--master-addr", "n:x"], "--master-addr is HOST:PORT"),
        (["--standalone", *TWO], "--standalone is one host, which needs no endpoint: leave it out"),
        (["--standalone", "--rdzv-endpoint", "n:1"], "--standalone is one host"),
        (
            ["--elastic", "--nnodes", "3", "--rdzv-endpoint", "192.0.2.1:1"],
            "this one has a number from 1 to 2",
        ),
    ],
)
def test_where_hosts_meet(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *words, "train.py"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


@pytest.mark.parametrize(
    ("words", "number"),
    [
        (["--standalone", "--rdzv-backend", "c10d"], 0),
        (["--rdzv-endpoint", "192.0.2.1:1"], 0),  # one host has no other number
        ([*TWO, "--rdzv-endpoint", "127.0.0.1:1"], 0),
        ([*TWO, "--rdzv-endpoint", "192.0.2.1:1", "--rdzv-backend", "c10d"], 1),
        (["--nnodes", "3", "--rdzv-endpoint", "127.0.0.1:1"], 0),
        (["--nnodes", "3", "--rdzv-endpoint", "192.0.2.1:1"], UNNUMBERED),
        ([*TWO, "--rdzv-endpoint", "127.0.0.1:1", "--node-rank", "1"], 1),
    ],
)
def test_torchruns_words_do_not_say_which_host_this_is(words: list[str], number: int) -> None:
    """192.0.2.1 is nobody's (RFC 5737)."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert make_plan(parser.parse_args([*words, "train.py"])).hosts.number == number


@pytest.mark.parametrize("value", ["0", "0.05"])
def test_a_stall_that_ranks_would_ignore(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["run", "--stall-after", value, "train.py"])
    assert "a number of seconds, 0.1 and more; leave it out" in capsys.readouterr().err
    assert read_stall_after(value) is None
    assert read_stall_after(f"{MIN_STALL_S:g}") == MIN_STALL_S


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"), [(8, 2, "4"), (8, 3, "2"), (8, 8, "1"), (2, 5, "1")]
)
def test_threads_are_cores_by_ranks(
    cores: int, ranks: int, threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And never none. Cores are those that this process may use, for ``-n auto``, too."""
    monkeypatch.setattr("paceline.cores.cpu_quota", lambda: None)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    assert job_environ(ranks, "run", {}, {})["OMP_NUM_THREADS"] == threads
    assert job_environ(ranks, "run", {}, {"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"
    assert _ranks("auto") == _ranks("cpu") == cores


def test_threads_are_no_more_than_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container sees all cores of its host, and may use some."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr("paceline.cores.cpu_quota", lambda: 4.5)
    assert job_environ(2, "run", {}, {})["OMP_NUM_THREADS"] == "2"
    assert _ranks("auto") == 4
    monkeypatch.setattr("paceline.cores.cpu_quota", lambda: 0.5)
    assert job_environ(2, "run", {}, {})["OMP_NUM_THREADS"] == "1"


def test_a_rank_of_an_elastic_job_may_start_a_job() -> None:
    """Its ranks are none of the outer job: they have records of their own."""
    told = {
        *(RECORD_AS, member_process.MEMBER_PID, protocol.ATTEMPT),
        *(protocol.DIRECTORY, protocol.MEMBER, protocol.HOSTS),
    }
    assert told == OF_A_MEMBER
    found = job_environ(1, "run", {}, dict.fromkeys(told, "1") | {"PACELINE_ELASTIC_X": "kept"})
    assert not told & found.keys()
    assert found["PACELINE_ELASTIC_X"] == "kept"


SHOWS = "import sys, os; print(sys.argv[1:], os.environ['OMP_NUM_THREADS'])"


@pytest.mark.slow
def test_a_whole_run_on_one_core(tmp_path: Path) -> None:
    """Its script gets the secret, its run folder does not; as many ranks as cores."""
    (tmp_path / "train.py").write_text(SHOWS)
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        words = ["-n", "auto", "--run-dir", "run", "train.py", "--api-key", "X", "--token=Y"]
        done = launch(*words, cwd=tmp_path)
    finally:
        os.sched_setaffinity(0, before)
    assert (done.returncode, done.stdout) == (0, "['--api-key', 'X', '--token=Y'] 1\n")
    found = json.loads((tmp_path / "run" / "run.json").read_text())
    assert found["command"] == ["train.py", "--api-key", "***", "--token=***"]
    assert found["world"] == 1


def test_the_place_of_last_resort_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said once, and training goes on."""

    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    class Trains:
        def __init__(self, *_: object) -> None: ...

        def run(self) -> int:
            return 7

    (tmp_path / "train.py").write_text("")
    (tmp_path / "paceline-runs").write_text("a file is in the way")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("paceline.observe.run_folder.RunFolder.write_info", no_room)
    monkeypatch.setattr("paceline.cli.run.Job", Trains)
    assert main(["run", "train.py"]) == 7
    first, second = capsys.readouterr().err.splitlines()
    assert "cannot be made" in first
    assert second == (
        "paceline run: run.json cannot be written there: No space left on device. Training goes on"
    )
