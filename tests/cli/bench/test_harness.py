"""What all benchmarks share: estimates, comparisons, progress, checks of output files."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.bench.harness.comparison import Comparison, rounds_of
from paceline.cli.bench.harness.estimates import bootstrap_interval, p50, ratio
from paceline.cli.bench.harness.interleave import Cost, mean_over_ranks, take_turns
from paceline.cli.bench.harness.options import check_outputs, sizes
from paceline.cli.bench.harness.plot import draw_comparisons
from paceline.cli.bench.harness.progress import RoundBar
from paceline.cli.bench.harness.resident import peers_bytes
from paceline.errors import ConfigurationError


def test_p50_is_over_all_steps() -> None:
    assert p50([[1.0, 2.0], [3.0, 4.0], [100.0]]) == 3.0


def test_a_slow_round_disturbs_both_sides_alike() -> None:
    quiet, disturbed = [10.0, 10.0], [70.0, 70.0]
    measured = ratio([[11.0], [77.0], [11.0]], [quiet, disturbed, quiet])
    assert measured.value == pytest.approx(1.1)
    assert measured.low == measured.high == pytest.approx(1.1)


def test_the_interval_holds_the_median_and_narrows_with_more_rounds() -> None:
    values = [1.0, 1.1, 1.2, 1.3, 1.4]
    low, high = bootstrap_interval(values)
    assert 1.0 <= low <= 1.2 <= high <= 1.4
    narrower = bootstrap_interval(values * 20)
    assert narrower[1] - narrower[0] < high - low


def test_ranks_are_averaged_step_by_step() -> None:
    first = {"a": [[Cost(1.0, 10.0), Cost(2.0, 20.0)]]}
    second = {"a": [[Cost(3.0, 30.0), Cost(4.0, 40.0)]]}
    assert mean_over_ranks([first, second]) == {"a": [[Cost(2.0, 20.0), Cost(3.0, 30.0)]]}


def comparison(**times: list[float]) -> Comparison:
    blocks = {name: [[ms] for ms in found] for name, found in times.items()}
    return Comparison("work", "slow", blocks, aside=("aside",))


def test_one_winner() -> None:
    found = comparison(slow=[10.0, 12.0, 11.0], fast=[5.0, 6.0, 5.5], aside=[1.0, 1.0, 1.0])
    assert found.winners == ["fast"]
    assert found.speed("fast").value == pytest.approx(2.0)
    assert found.to_json()["speed_over_baseline"]["fast"]["value"] == pytest.approx(2.0)


def test_who_cannot_be_told_from_the_winner_has_won_too() -> None:
    found = comparison(slow=[10.0, 10.0, 10.0], one=[5.0, 6.0, 5.0], other=[6.0, 5.0, 6.0])
    assert found.winners == ["one", "other"]


def test_half_of_the_rounds() -> None:
    found = comparison(slow=[1.0, 2.0, 3.0, 4.0])
    assert rounds_of(found, 0).times_ms["slow"] == [[1.0], [3.0]]
    assert rounds_of(found, 1).times_ms["slow"] == [[2.0], [4.0]]


def test_turns_are_shuffled_and_complete(capsys: pytest.CaptureFixture[str]) -> None:
    order: list[str] = []

    def turn(name: str) -> int:
        order.append(name)
        return len(order)

    found = take_turns("abc", RoundBar("letters", 12), turn)
    rounds = ["".join(order[at : at + 3]) for at in range(0, 36, 3)]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len(set(rounds)) > 1
    assert [len(each) for each in found.values()] == [12, 12, 12]
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"letters: {n} of 12" for n in (3, 6, 9, 12)]


def test_progress_of_other_ranks_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with RoundBar("title", 2, is_shown=False) as bar:
        bar.advance()
    assert capsys.readouterr().err == ""


@pytest.mark.may_leave("descriptors")  # matplotlib keeps its fonts open
def test_plot_marks_the_winner(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    found = comparison(slow=[10.0, 12.0], fast=[5.0, 6.0])
    file = tmp_path / "plot.svg"
    draw_comparisons(file, "title", [found, found])
    text = file.read_text()
    assert text.count("2.00 ★") == 2
    assert "1.00 ★" not in text


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        ({"json": "no/such/directory/x.json"}, "there is no directory no/such/directory"),
        ({"json": "."}, "this is a directory"),
        ({"plot": "no/such/directory/x.png"}, "there is no directory no/such/directory"),
        ({"plot": "x.nonsense"}, "cannot be drawn as .nonsense"),
        ({"json": "/proc/self/x.json"}, "this user may not write it"),
    ],
)
def test_output_files_are_checked_first(outputs: dict[str, Any], text: str) -> None:
    paths = {name: Path(value) for name, value in outputs.items()}
    with pytest.raises(ConfigurationError, match=text):
        check_outputs(argparse.Namespace(**paths))


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="pip install matplotlib"):
        check_outputs(argparse.Namespace(plot=Path("x.png")))


def test_sizes() -> None:
    assert sizes("256,64K,1m") == [256, 65536, 1 << 20]
    for wrong in ("", "3", "x", "0", "1G"):
        with pytest.raises(argparse.ArgumentTypeError):
            sizes(wrong)


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
