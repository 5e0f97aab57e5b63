"""``paceline bench hooks``: measures, prints a table, draws a plot, says who wins where."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli import main
from paceline.cli.bench.hooks import winners
from paceline.cli.bench.hooks_ranks import HookSample


@pytest.mark.may_leave("descriptors")  # matplotlib keeps its fonts open
def test_table_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "hooks.png"
    words = ["bench", "hooks", "--model", "tests.cli.test_bench_hooks:own_model", "--steps", "2"]
    assert main([*words, "--hooks", "int8,powersgd", "--plot", str(plot)]) == 0
    out = capsys.readouterr().out
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
    assert "from " in out.splitlines()[-2]
    assert plot.read_bytes().startswith(b"\x89PNG")


def own_model() -> object:
    import torch

    return torch.nn.Linear(256, 256), torch.randn(4, 256)


def test_winners() -> None:
    samples = [
        HookSample("plain", 100_000_000, 0.0, 10.0),
        HookSample("half", 50_000_000, 20.0, 10.0),
        HookSample("tiny", 1_000_000, 300.0, 10.0),
    ]
    assert [text.rpartition(": ")[2] for text in winners(samples)] == ["tiny", "half", "plain"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--ranks", "1"], "nothing is sent by less than 2 ranks"),
        (["--steps", "0"], "at least 1 step"),
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


def test_plot_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["bench", "hooks", "--plot", "x.png"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
