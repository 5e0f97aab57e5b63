"""``paceline bench hooks``: measures, prints a table, draws a plot, says who wins where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.cli.bench.harness.interleave import Cost
from paceline.cli.bench.hooks_accuracy import difference
from paceline.cli.bench.hooks_ranks import HookCosts, StepCost
from paceline.cli.bench.hooks_report import winners


@pytest.mark.may_leave("descriptors")  # matplotlib keeps its fonts open
@pytest.mark.slow
def test_table_and_plot(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plot, numbers = tmp_path / "hooks.png", tmp_path / "hooks.json"
    words = ["bench", "hooks", "--model", "tests.cli.bench.test_hooks:own_model", "--rounds", "3"]
    words += ["--seeds", "2", "--epochs", "2", "--json", str(numbers)]
    assert main([*words, "--hooks", "int8,powersgd", "--plot", str(plot)]) == 0
    captured = capfd.readouterr()  # ranks write, too
    out = captured.out
    rows = {
        cells[1].strip(): [cell.strip() for cell in cells]
        for cells in (line.split("│") for line in out.splitlines())
        if len(cells) > 8
    }
    assert set(rows) == {"allreduce", "int8", "powersgd"}
    # Counted, not computed: 4 bytes for each value, a little for headers and control.
    assert float(rows["allreduce"][2]) == pytest.approx(4 * 256 * 257 / 1e6, rel=0.05)
    assert float(rows["int8"][3]) < 0.3
    assert float(rows["powersgd"][3]) < 0.1
    assert any(line.startswith("from ") for line in out.splitlines())
    assert "trainings of 2 epochs: 6 of 6" in captured.err
    told = json.loads(numbers.read_text())
    assert {name: len(found) for name, found in told["accuracy"].items()} == dict.fromkeys(rows, 2)
    assert all(0.5 < share < 1 for share in told["accuracy"]["allreduce"])
    assert [each["title"] for each in told["links"]][:2] == ["0.1 Gbit", "1 Gbit"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def own_model() -> object:
    import torch

    return torch.nn.Linear(256, 256), lambda: torch.randn(4, 256)


def costs(**hooks: tuple[int, float]) -> HookCosts:
    """Three rounds alike: bytes and CPU time of each hook; a step takes 10 ms without."""

    def step(sent_bytes: int, cpu_ms: float) -> list[StepCost]:
        return [StepCost(Cost(10.0, cpu_ms), sent_bytes)] * 3

    return HookCosts(
        {"noop": step(0, 5.0), **{n: step(b, 5.0 + ms) for n, (b, ms) in hooks.items()}}
    )


def test_winners() -> None:
    found = costs(allreduce=(100_000_000, 0.0), half=(50_000_000, 20.0), tiny=(1_000_000, 300.0))
    names = [text.rpartition(": ")[2] for text in winners(found)]
    assert names == ["tiny", "half", "allreduce"]
    slow = found.over("slow", 1e8)
    assert slow.winners == ["tiny"]
    assert slow.time_ms("half").value == pytest.approx(10 + 20 + 4000)


def test_accuracy_is_compared_seed_by_seed() -> None:
    lost = difference([0.90, 0.80], [0.91, 0.80])
    assert (lost.mean, lost.least, lost.most) == pytest.approx((-0.5, -1.0, 0.0))
    assert str(lost) == "-0.5 (-1.0 to +0.0)"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--ranks", "1"], "nothing is sent by less than 2 ranks"),
        (["--seeds", "-1"], "--seeds -1: 0 or more"),
        (["--model", "nothing:there"], "--model nothing:there: No module named 'nothing'"),
        (["--model", "nothing"], "write mlp, transformer, small, or MODULE:FUNCTION"),
        (["--plot", "no/such/directory/x.png"], "there is no directory no/such/directory"),
        (["--plot", "x.nonsense"], "cannot be drawn as .nonsense"),
        (["--hooks", "int4"], "no hook 'int4' to measure; there are: allreduce"),
    ],
)
def test_bad_arguments(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "hooks", *words]) == 2
    assert text in capsys.readouterr().err
