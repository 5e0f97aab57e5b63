"""``paceline bench dp``: replicas beside the plain module."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli import main


@pytest.mark.slow
@pytest.mark.may_leave("descriptors")  # matplotlib keeps its fonts open
def test_replicas_beside_the_plain_module(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers, plot = tmp_path / "out.json", tmp_path / "out.png"
    words = ["bench", "dp", "--models", "small", "--launches", "2", "--rounds", "2", "--steps", "1"]
    assert main([*words, "--json", str(numbers), "--plot", str(plot)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    report = json.loads(numbers.read_text())
    [found] = report["comparisons"]
    assert {name: len(rounds) for name, rounds in found["times_ms"].items()} == {
        "plain": 4,
        "plain again": 4,
        "replicas": 4,
    }
    assert report["parts_ms"] > 0
    assert "scatter + replicate + gather" in capsys.readouterr().out
