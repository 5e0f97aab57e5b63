"""``paceline bench elastic``: what follows a kill, from the notes of ranks; and the whole of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.cli.bench.elastic.contenders import CONTENDERS, command
from paceline.cli.bench.elastic.kills import MeasuredKill, StepNote, samples_per_s, what_followed
from paceline.cli.bench.elastic.overhead import Overhead
from paceline.cli.bench.elastic.report import Result, find_missed, headline
from paceline.cli.bench.harness.estimates import Estimate


def note(at_s: float, step: int, epoch: int, pid: int) -> StepNote:
    return StepNote(at_s, step, epoch, pid - 10, pid)


BEFORE = [note(1.0, 1, 0, 10), note(1.0, 1, 0, 11), note(2.0, 2, 0, 10), note(2.0, 2, 0, 11)]


def test_the_step_that_was_under_way_does_not_count() -> None:
    late = note(2.6, 3, 0, 10)  # its reductions were complete
    assert what_followed([*BEFORE, late], 2.5, {10, 11}, 11) is None
    survivor, new = note(3.0, 4, 1, 10), note(4.5, 7, 2, 12)
    assert what_followed([*BEFORE, late, survivor], 2.5, {10, 11}, 11) is None
    kill = what_followed([*BEFORE, late, survivor, new], 2.5, {10, 11}, 11)
    assert kill is not None
    assert (kill.next_step_s, kill.replaced_s, kill.repeated) == (0.5, 2.0, 0)


def test_steps_that_are_done_again_are_counted() -> None:
    again = [note(9.0, 2, 1, 12), note(9.0, 2, 1, 13)]
    kill = what_followed([*BEFORE, *again], 2.5, {10, 11}, 11)
    assert kill is not None
    assert kill.repeated == 1


def test_speed_over_time_counts_a_step_once() -> None:
    assert samples_per_s(BEFORE, 64, 0.5) == [(1.0, 128.0), (1.5, 0.0), (2.0, 128.0)]
    assert samples_per_s([], 64, 0.5) == []


def test_a_panel_says_what_it_shows_or_why_it_is_empty() -> None:
    kills = [
        MeasuredKill(2.0, 11, seconds, 3.0, repeated) for seconds, repeated in ((0.2, 0), (0.4, 2))
    ]
    found = headline(Result("torchrun", kills, BEFORE, "", []))
    assert found == "torchrun; 2 kills, the next step after 0.40 s (median); 2 steps done again"
    assert headline(Result("torchft", [], [], "it is not installed", [])) == (
        "torchft; it is not installed"
    )


@pytest.mark.parametrize("contender", CONTENDERS)
def test_commands_name_the_script(contender: str, tmp_path: Path) -> None:
    words = command(contender, 3, tmp_path)
    assert words[-3:] == [words[-3], contender.split(",")[0], str(tmp_path / "notes")]
    assert "3" in words


def test_a_wrong_contender_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "elastic", "--contenders", "horovod"]) == 2
    assert "horovod: choose from paceline-spare" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ratio", "is_met"),
    [
        (Estimate(1.003, 0.999, 1.007), True),
        (Estimate(1.008, 0.999, 1.020), False),
        (Estimate(1.003, 1.001, 1.005), False),  # small, but there
        (Estimate(0.990, 0.980, 0.995), True),
    ],
)
def test_a_target_is_missed_unless_it_is_shown_to_be_met(ratio: Estimate, *, is_met: bool) -> None:
    assert bool(find_missed([], [Overhead("small", ratio, 7.0, 10.0, 40.0)])) is not is_met
    assert find_missed([], [Overhead("small", ratio, 7.0, 51.0, 90.0)])


@pytest.mark.alone
@pytest.mark.may_leave("descriptors")  # matplotlib's fonts
def test_kills_beside_torchrun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers, picture = tmp_path / "out.json", tmp_path / "out.png"
    words = ["bench", "elastic", "--ranks", "2", "--kills", "1", "--rounds", "2"]
    words += ["--contenders", "paceline,torchrun", "--json", str(numbers), "--plot", str(picture)]
    assert main(words) == 0
    report = json.loads(numbers.read_text())
    for each in report["contenders"]:
        assert each["problem"] == ""
        assert len(each["kills"]) == 1
        assert each["samples_per_s"]
    assert report["contenders"][0]["kills"][0]["repeated"] == 0
    assert set(report["contenders"][0]["phases"][0]) >= {"heard", "rebuilt", "first step"}
    assert [each["model"] for each in report["overhead"]] == ["small", "middle", "large"]
    assert all(0 < each["commit_us"] < 1e3 * each["step_ms"] for each in report["overhead"])
    assert picture.stat().st_size > 1000
    assert "while nothing fails" in capsys.readouterr().out
