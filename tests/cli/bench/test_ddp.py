"""``paceline bench ddp``: a step of our models or the user's, and honest advice."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.cli import main
from paceline.cli.bench.ddp_advice import advise, gain
from paceline.cli.bench.harness import workloads
from paceline.cli.bench.harness.comparison import Comparison
from paceline.cli.bench.harness.contenders import WRAPPERS, bucket_sizes, hooked, transports
from paceline.errors import ConfigurationError

HERE = "tests.cli.bench.test_ddp"
QUICK = ["--ranks", "2", "--launches", "1", "--steps", "1"]
NAMES = ["local", "torch", "torch views", "paceline"]


def make() -> tuple[nn.Module, object]:
    return nn.Linear(4, 2), lambda: torch.ones(3, 4)


def make_alone() -> nn.Module:
    class OwnData(nn.Linear):
        def forward(self) -> torch.Tensor:  # type: ignore[override]
            return super().forward(torch.ones(3, 4))

    return OwnData(4, 2)


def make_with_words() -> tuple[nn.Module, object]:
    class Words(nn.Linear):
        def forward(self, *, x: torch.Tensor, scale: float) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return {"loss": (super().forward(x) * scale).sum()}

    return Words(4, 2), lambda: {"x": torch.ones(3, 4), "scale": 2.0}


def make_broken() -> tuple[nn.Module, object]:
    return nn.Linear(4, 2), lambda: torch.ones(3, 5)


def make_raising() -> nn.Module:
    raise ValueError("no weights here")


def make_tensor_batch() -> tuple[nn.Module, torch.Tensor]:
    return nn.Linear(4, 2), torch.ones(3, 4)


def make_frozen() -> tuple[nn.Module, object]:
    class Scale(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    return Scale(), lambda: torch.ones(3, 4, requires_grad=True)


def make_number() -> int:
    return 3


@pytest.mark.may_leave("descriptors")  # matplotlib keeps its fonts open
@pytest.mark.slow
def test_own_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers, plot = tmp_path / "out.json", tmp_path / "out.svg"
    words = [*QUICK, "--rounds", "6", "--compare", "wrappers,hooks", "--json", str(numbers)]
    words += ["--plot", str(plot)]
    assert main(["bench", "ddp", "--model", f"{HERE}:make", *words]) == 0
    assert "<svg" in plot.read_text()
    [found] = json.loads(numbers.read_text())["comparisons"]
    assert list(found["times_ms"]) == [
        *NAMES,
        *(f"paceline, {h}" for h in ("fp16", "int8", "powersgd")),
    ]
    assert all([len(turn) for turn in each] == [1] * 6 for each in found["times_ms"].values())
    assert len(found["advice"]) == 3
    out = capsys.readouterr().out
    assert "torch's DDP" in out
    assert "hooks.register(ddp" in out


@pytest.mark.slow
def test_our_models_and_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = tmp_path / "out.json"
    words = ["bench", "ddp", "--model", "small", "--ranks", "2", "--launches", "2", "--rounds", "2"]
    words += ["--steps", "1", "--control", "--json", str(numbers)]
    words += ["--also", "meet=benchmarks.floor:MeetOnly"]
    monkeypatch.setattr("paceline.cli.bench.ddp_report.TARGETS", {"small": (0.0, 0.0, None)})
    assert main([*words, "--check"]) == 0
    [found] = json.loads(numbers.read_text())["comparisons"]
    assert list(found["times_ms"]) == [*NAMES, "meet", "torch views again"]
    assert len(found["times_ms"]["paceline"]) == 4
    monkeypatch.setattr("paceline.cli.bench.ddp_report.TARGETS", {"small": (99.0, 99.0, None)})
    assert main(words) == 0
    assert main([*words, "--check"]) == 1


@pytest.mark.parametrize("name", ["make", "make_alone", "make_with_words"])
def test_what_a_function_may_return(name: str) -> None:
    found = workloads.probe(f"{HERE}:{name}")
    assert found.problem == ""
    assert (found.parameters, found.gradient_bytes) == (2, 40)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("none", "there is no such model; write mlp, transformer, small, or MODULE:FUNCTION"),
        ("nothing:there", "No module named 'nothing'"),
        (f"{HERE}:absent", "has no attribute 'absent'"),
        (f"{HERE}:make_raising", "calling it failed: ValueError: no weights here"),
        (f"{HERE}:make_number", "it returned int. Expected a model"),
        (f"{HERE}:make_tensor_batch", "it returned a model and Tensor. Expected"),
        (f"{HERE}:make_broken", "a step of it failed: RuntimeError"),
        (f"{HERE}:make_frozen", "no parameter got a gradient"),
    ],
)
def test_models_that_cannot_be_measured(
    model: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "ddp", "--model", model]) == 2
    error = capsys.readouterr().err
    assert f"--model {model}" in error
    assert text in error
    assert "Traceback" not in error


def test_a_module_that_does_not_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_model.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"ZeroDivisionError.*broken_model\.py, line 1"):
        workloads.make("broken_model:make")


def test_too_large_for_this_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("paceline.cli.bench.harness.resident.available_bytes", lambda: 1000)
    assert main(["bench", "ddp", "--model", f"{HERE}:make"]) == 2
    assert "GiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--also", "x"], "not of the form LABEL=MODULE:CLASS"),
        (["--also", "torch=a:b"], "the label 'torch' is taken"),
    ],
)
def test_wrong_options(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ddp", "--model", "small", *words]) == 2
    assert text in capsys.readouterr().err


# --- advice ------------------------------------------------------------------------------------

SETTINGS = (*WRAPPERS, *transports(), *bucket_sizes(50 << 20), hooked("int8"))


def compared(noise: float = 0.01, **scale: float) -> Comparison:
    """Steps of 100 ms, times the scale of a contender, with some noise."""
    draw = random.Random(0)
    times = {
        each.label: [
            [100 * scale.get(each.label.replace("paceline, ", ""), 1.0) * draw.gauss(1, noise)]
            for _ in range(20)
        ]
        for each in SETTINGS
    }
    return Comparison("model", "torch", times, aside=("local",))


def test_bucket_sizes_that_make_no_difference_are_left_out() -> None:
    assert [each.options["bucket_cap_mb"] for each in bucket_sizes(50 << 20)] == [1, 5, 100]
    assert [each.options["bucket_cap_mb"] for each in bucket_sizes(3 << 20)] == [1]
    assert bucket_sizes(1000) == ()


def test_a_gain_is_told_with_its_interval() -> None:
    found = compared(**{"buckets of 5 MB": 0.8})
    told = gain(found, "paceline", "paceline, buckets of 5 MB")
    assert told.low <= told.value <= told.high
    assert told.value == pytest.approx(20, abs=2)
    sentences = advise(found, SETTINGS)
    assert any(
        text.startswith("change: DistributedDataParallel(model, bucket_cap_mb=5): a step takes")
        for text in sentences
    )


def test_nothing_to_gain_is_said() -> None:
    sentences = advise(compared(), SETTINGS)
    assert [text for text in sentences if text.startswith("change")] == []
    assert any("nothing to gain by transports and bucket sizes" in text for text in sentences)
    assert any("nothing to gain by hooks" in text for text in sentences)


def test_luck_is_no_gain() -> None:
    """With much noise the best of many looks good; the other half of the rounds tells."""
    sentences = advise(compared(noise=0.5), SETTINGS)
    assert [text for text in sentences if text.startswith("change: Distributed")] == []


def test_torch_may_be_faster() -> None:
    sentences = advise(compared(paceline=1.3), SETTINGS)
    assert sentences[0].startswith("keep torch's DDP")
    assert "30 %" in sentences[0]


def test_a_lossy_hook_is_only_possible() -> None:
    sentences = advise(compared(int8=0.5), SETTINGS)
    assert any(text.startswith('possible: hooks.register(ddp, "int8")') for text in sentences)


def test_too_few_rounds_for_advice() -> None:
    found = compared()
    few = {name: blocks[:5] for name, blocks in found.times_ms.items()}
    [sentence] = advise(Comparison("model", "torch", few), SETTINGS)
    assert "--rounds 6 or more" in sentence
