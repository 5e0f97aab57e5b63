"""``paceline bench allreduce``: gloo and Paceline in turn, and MPI and DeepSpeed where they run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.cli.bench.allreduce_contenders import MPIS, find_contenders
from paceline.errors import ConfigurationError

DEEPSPEED = Path(__file__).parents[3] / "build" / "deepspeed"
SMALL = ["bench", "allreduce", "--ranks", "2", "--sizes", "256,64K", "--rounds", "3"]


@pytest.mark.may_leave("descriptors")  # matplotlib keeps its fonts open
def test_table_json_and_plot(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    numbers, plot = tmp_path / "out.json", tmp_path / "out.png"
    words = [*SMALL, "--contenders", "gloo,paceline", "--json", str(numbers), "--plot", str(plot)]
    assert main(words) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    found = json.loads(numbers.read_text())["comparisons"]
    assert [each["title"] for each in found] == ["256 B, 2 ranks", "64 KiB, 2 ranks"]
    for each in found:
        assert {name: len(rounds) for name, rounds in each["times_ms"].items()} == {
            "gloo": 3,
            "paceline": 3,
        }
    captured = capfd.readouterr()  # ranks write, too
    assert "x as fast as gloo" in captured.out
    assert "64 KiB, 2 ranks: 3 of 3" in captured.err


@pytest.mark.alone
def test_paceline_is_faster_than_gloo(tmp_path: Path) -> None:
    """One number after all: two to twenty times faster is not a matter of a busy machine."""
    numbers = tmp_path / "out.json"
    words = [*SMALL[:-1], "9", "--contenders", "gloo,paceline", "--json", str(numbers)]
    assert main(words) == 0
    for each in json.loads(numbers.read_text())["comparisons"]:
        assert each["speed_over_baseline"]["paceline"]["value"] > 2


@pytest.mark.alone
@pytest.mark.parametrize("name", list(MPIS))
def test_beside_mpi(name: str, tmp_path: Path) -> None:
    missing = find_contenders(None).missing
    if name in missing:
        pytest.skip(f"{name}: {missing[name]}")
    numbers = tmp_path / "out.json"
    assert main([*SMALL, "--contenders", f"paceline,{name}", "--json", str(numbers)]) == 0
    for each in json.loads(numbers.read_text())["comparisons"]:
        assert {n: len(rounds) for n, rounds in each["times_ms"].items()} == {
            "gloo": 3,
            "paceline": 3,
            name: 3,
        }


@pytest.mark.alone
@pytest.mark.timeout(900)  # DeepSpeed compiles its all-reduce once
@pytest.mark.skipif(not DEEPSPEED.exists(), reason="needs DeepSpeed: `make contenders`")
def test_beside_deepspeed(tmp_path: Path) -> None:
    """In a folder of its own: other tests must not find it, Accelerate's for example."""
    numbers = tmp_path / "out.json"
    words = ["bench", "allreduce", "--ranks", "2", "--sizes", "64K", "--rounds", "1"]
    words += ["--contenders", "paceline,deepspeed", "--json", str(numbers)]
    environ = {
        **os.environ,
        "PYTHONPATH": str(DEEPSPEED),
        "PATH": f"{DEEPSPEED / 'bin'}:{os.environ['PATH']}",
    }
    told = subprocess.run(
        [sys.executable, "-m", "paceline", *words],
        env=environ,
        capture_output=True,
        text=True,
        timeout=840,
    )
    assert told.returncode == 0, told.stderr[-3000:]
    for each in json.loads(numbers.read_text())["comparisons"]:
        assert {n: len(rounds) for n, rounds in each["times_ms"].items()} == {
            "gloo": 1,
            "paceline": 1,
            "deepspeed": 1,
        }
    assert not list(Path("/dev/shm").glob("deepspeed*")), "its files are removed"


def test_a_deepspeed_that_cannot_be_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("raise OSError('no compiler here')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"cannot be built .*: OSError: no compiler here"):
        find_contenders(["deepspeed"])


def test_a_contender_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in (*MPIS, "deepspeed"):
        with pytest.raises(ConfigurationError, match=f"--contenders {name}: .*pip install"):
            find_contenders([name])
    found = find_contenders(None)
    assert set(found.missing) == {*MPIS, "deepspeed"}
    assert found.in_process == ["gloo", "paceline"]


def test_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "allreduce", "--ranks", "1"]) == 2
    assert "one rank has nothing to reduce" in capsys.readouterr().err
