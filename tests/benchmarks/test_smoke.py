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
from paceline.testing import run_ranks

VARIANTS = {"local", "torch", "torch views", "paceline"}


def run(json_file: Path, *words: str) -> Any:
    assert main([*words, "--json", str(json_file)]) == 0
    return json.loads(json_file.read_text())


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
def test_hot_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("hot_path", "--ranks", "1", "--rounds", "2", "--steps", "1", "--profile")
    report = run(tmp_path / "out.json", *words)
    added = report["results"][0]["added_us_per_parameter"]
    assert set(added) == (VARIANTS - {"local"}) | {"empty hooks"}
    functions = [line["function"] for line in report["profiles"][0]["lines"]]
    assert any("paceline" in name or "ddp/" in name for name in functions)
    assert "microseconds" in capsys.readouterr().out


@pytest.mark.slow
def test_shards(tmp_path: Path) -> None:
    words = ("shards", "--models", "small", "--ranks", "1,2", "--shards", "4", "--rounds", "2")
    report = run(tmp_path / "out.json", *words)
    assert [(each["model"], each["ranks"]) for each in report["times"]] == [
        ("small", 1),
        ("small", 2),
    ]
    assert all(0.1 < each["cpu"]["value"] < 10 for each in report["times"])
    assert [each["allowed"] for each in report["memory"]] == [3.0, 2.0]
    assert all(each["sets"] <= each["allowed"] for each in report["memory"])


@pytest.mark.slow
def test_paceline_takes_one_gradient_set(tmp_path: Path) -> None:
    report = run(tmp_path / "out.json", "memory", "--check")
    one_set = report["gradient_bytes"]
    results = report["results"]
    assert results["torch"]["later"] > 1.8 * one_set
    assert max(results["paceline"][step] for step in ("first", "second", "later")) < 1.2 * one_set


@pytest.mark.parametrize("words", [["--compare", "none"], ["--ranks", "0"], ["--rounds", "x"]])
def test_wrong_options_are_explained(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(words)
    assert exit_info.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_unknown_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["speed"]) == 2
    assert "hot_path" in capsys.readouterr().err


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
