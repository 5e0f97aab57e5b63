"""Each benchmark runs and writes what it says; the numbers themselves are nobody's test."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.__main__ import main
from benchmarks.floor import MeetOnly
from benchmarks.ratios import ratio
from benchmarks.rss import peers_bytes
from paceline.testing import run_ranks

VARIANTS = {"local", "torch", "torch views", "paceline"}


def run(json_file: Path, *words: str) -> Any:
    assert main([*words, "--json", str(json_file)]) == 0
    return json.loads(json_file.read_text())


def test_step_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--models small --ranks 2 --launches 2 --rounds 2 --steps 1 --control"
    (result,) = run(tmp_path / "out.json", *words.split())["results"]
    assert len(result["samples_wall_cpu_ms"]["paceline"]) == 4
    assert set(result["p50_ms"]) == {*VARIANTS, "torch views again"}
    assert all(value > 0 for value in result["p50_ms"].values())
    assert result["better_torch_mode"] in ("torch", "torch views")
    assert result["limit"] == 1 / 1.2
    estimate = result["against_torch"]["paceline"]
    assert estimate["low"] <= estimate["value"] <= estimate["high"]
    assert "paceline" in capsys.readouterr().out


@pytest.mark.slow
def test_step_times_apart(tmp_path: Path) -> None:
    """Processes of their own for each variant, and still round by round."""
    words = "--models small --ranks 2 --launches 1 --rounds 3 --steps 2 --apart"
    (result,) = run(tmp_path / "out.json", *words.split())["results"]
    samples = result["samples_wall_cpu_ms"]
    assert set(samples) == VARIANTS
    assert all([len(block) for block in blocks] == [2, 2, 2] for blocks in samples.values())


@pytest.mark.slow
def test_the_floor_of_a_step_is_measured_beside_it(tmp_path: Path) -> None:
    words = "--models small --ranks 2 --launches 1 --rounds 2 --steps 1 --apart"
    floor = "--also meet=benchmarks.floor:MeetOnly"
    (result,) = run(tmp_path / "out.json", *words.split(), *floor.split())["results"]
    assert set(result["p50_ms"]) == {*VARIANTS, "meet"}
    assert result["p50_ms"]["meet"] > 0


def waited_for_the_other() -> float:
    model = MeetOnly(nn.Linear(2, 2))
    loss = model(torch.ones(1, 2)).sum()
    dist.barrier()
    time.sleep(float(dist.get_rank()))
    began = time.perf_counter()
    loss.backward()
    return time.perf_counter() - began


@pytest.mark.slow
def test_ranks_of_the_floor_do_meet() -> None:
    first, second = run_ranks(2, waited_for_the_other)
    assert first > second + 0.5


@pytest.mark.slow
def test_collectives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And one number after all: two to twenty times faster is not a matter of a busy machine."""
    words = ("collectives", "--ranks", "2", "--sizes", "256,64K", "--rounds", "5")
    samples = run(tmp_path / "out.json", *words)["2"]
    assert set(samples) == {"256", "65536"}
    for engines in samples.values():
        assert {name: len(rounds) for name, rounds in engines.items()} == {"gloo": 5, "paceline": 5}
        assert ratio(engines["gloo"], engines["paceline"]).value > 2
    assert "paceline ms" in capsys.readouterr().out


def test_memory_of_peers_is_told_apart() -> None:
    smaps = """\
7f00-7f10 rw-s 00000000 00:01 11 /memfd:paceline-arena-0 (deleted)
Size:  64 kB
Rss:   40 kB
7f10-7f20 rw-s 00000000 00:01 12 /memfd:paceline-arena-1 (deleted)
Rss:   24 kB
7f20-7f30 rw-p 00000000 00:00 0
Rss:   8 kB
"""
    assert peers_bytes(smaps, rank=0) == 24 * 1024
    assert peers_bytes(smaps, rank=1) == 40 * 1024


@pytest.mark.slow
def test_hot_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("hot_path", "--ranks", "1", "--rounds", "2", "--steps", "1", "--profile")
    report = run(tmp_path / "out.json", *words)
    added = report["results"][0]["added_us_per_parameter"]
    assert set(added) == (VARIANTS - {"local"}) | {"empty hooks"}
    functions = [line["function"] for line in report["profiles"][0]["lines"]]
    assert any("paceline" in name or "ddp/" in name for name in functions)
    assert "microseconds" in capsys.readouterr().out


@pytest.mark.slow
def test_paceline_takes_one_gradient_set(tmp_path: Path) -> None:
    report = run(tmp_path / "out.json", "memory", "--check")
    one_set = report["gradient_bytes"]
    results = report["results"]
    assert results["torch"]["later"] > 1.8 * one_set
    assert max(results["paceline"][step] for step in ("first", "second", "later")) < 1.2 * one_set


@pytest.mark.slow
def test_data_parallel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "data_parallel --models small --launches 2 --rounds 2 --steps 1"
    report = run(tmp_path / "out.json", *words.split())
    (result,) = report["results"]
    assert set(result["p50_ms"]) == {"plain", "plain again", "replicas"}
    assert len(result["samples_wall_cpu_ms"]["replicas"]) == 4
    assert report["parts_ms"] > 0
    assert "scatter + replicate + gather" in capsys.readouterr().out


@pytest.mark.slow
def test_a_missed_target_is_told_by_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.ddp_step.Result.limit", 0.0)
    words = ["--models", "small", "--ranks", "1", "--launches", "1", "--rounds", "1"]
    assert main(words) == 0
    assert main([*words, "--check"]) == 1


@pytest.mark.parametrize("words", [["--models", "none"], ["--also", "x"], ["--ranks", "0"]])
def test_wrong_options_are_explained(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(words)
    assert exit_info.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_unknown_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["speed"]) == 2
    assert "ddp_step" in capsys.readouterr().err


@pytest.mark.slow
def test_one_message_of_a_parameter_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "ps_answer --shapes 2x5,1x9 --rows 20 --dim 4 --rounds 2 --messages 3 --optimizer Adam"
    results = run(tmp_path / "out.json", *words.split())["results"]
    assert set(results) == {"2 x 5", "1 x 9"}
    for answers in results.values():
        for kind in ("lookup_us", "push_us"):
            assert {name: len(us) for name, us in answers[kind].items()} == {
                "python": 2,
                "native": 2,
            }
    assert "python / native" in capsys.readouterr().out


@pytest.mark.slow
def test_parameter_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "ps_lookup --rows 100,10000 --unique 50 --bags 20 --ids 4 --dim 8 --servers 2 --rounds 2"
    )
    results = run(tmp_path / "out.json", *words.split())["results"]
    assert [each["rows"] for each in results] == [100, 10000, 10000]
    assert [each["unique"] for each in results[:2]] == [50, 50]
    assert results[0]["moved_bytes"] == results[1]["moved_bytes"]
    assert results[0]["server_bytes"] == results[1]["server_bytes"] >= 50 * 8 * 4
    assert "ratio" in capsys.readouterr().out


@pytest.mark.slow
def test_a_trainers_own_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "ps_trainer --tables 2 --rows 20 --dim 4 --ids 6 --bag 3 --steps 20"
    times = run(tmp_path / "out.json", *words.split())["times_s"]
    assert {"forward", "prefetch", "backward"} <= set(times)
    assert all(min(seconds) >= 0 for seconds in times.values())
    assert "native core" in capsys.readouterr().out


@pytest.mark.slow
def test_compression(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "powersgd_compress --models small --ranks 1 --rounds 2"
    (result,) = run(tmp_path / "out.json", *words.split())["results"]
    assert {name: len(times) for name, times in result["ms"].items()} == {"paceline": 2, "torch": 2}
    assert "PowerSGD" in capsys.readouterr().out
