"""Every script in examples/ runs, alone and under torchrun, and does what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.required import missing_framework, skip
from tests.script_job import run_script

EXAMPLES = Path(__file__).parents[1] / "examples"
DEADLINE_S = 250

# What the last line must look like; the number in it must be below the limit.
EXPECTED = {
    "own_hook.py": (r"error of the slope (\d\.\d+)", 0.2),
    # At chance, 0.37 would be missing.
    "recommender.py": (r"AUC 0\.\d+; chance is 0\.500, possible 0\.\d+: missing (-?\d\.\d+)", 0.04),
    "accelerate_gpt.py": (r"epoch 4  loss (\d\.\d+)", 2.0),  # log(40) is 3.7
    "lightning_fabric.py": (r"epoch 8  loss (\d\.\d+)", 0.1),
    "nanogpt.py": (r"step 100  loss (\d\.\d+)", 2.9),  # log(70) is 4.2
    "ray_train.py": (r"loss (\d\.\d+)", 0.2),
    "transformers_trainer.py": (r"loss (\d\.\d+)", 2.0),
    "same_bits.py": (r"SHA-256 of the model \w+, loss (\d\.\d+)", 0.1),
    "train_mlp.py": (r"epoch +\d+ +loss (\d\.\d+)", 0.02),
}
# They need a framework, which `make test-all` installs.
FRAMEWORK = {
    "accelerate_gpt.py": "accelerate",
    "lightning_fabric.py": "lightning",
    "ray_train.py": "ray",
    "transformers_trainer.py": "transformers",
}
# They start their ranks themselves.
STARTS_RANKS = {"lightning_fabric.py", "ray_train.py"}
LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
OWN = [name for name in EXPECTED if name not in FRAMEWORK]


def run(*words: str) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=DEADLINE_S, env=env
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def check(name: str, output: str) -> None:
    pattern, limit = EXPECTED[name]
    match = re.fullmatch(pattern, output.strip().splitlines()[-1])
    assert match, output
    assert float(match[1]) < limit


def test_every_example_is_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*EXPECTED, "elastic_digits.py"}


@pytest.mark.slow
def test_elastic_digits_ends_with_the_bits_of_an_undisturbed_run() -> None:
    pytest.importorskip("sklearn")
    options = ["--epochs", "5", "--kill-every", "1", "--step-pause", "0.02"]
    lines = run(str(EXAMPLES / "elastic_digits.py"), *options).splitlines()
    calm, rough = lines[-2].split(": ", 1), lines[-1].split(": ", 1)
    assert calm[0] == "undisturbed"
    assert re.fullmatch(r"with [1-9]\d* kills", rough[0])
    assert calm[1].strip() == rough[1].strip()
    assert re.search(r"accuracy [89]\d", rough[1])


def test_the_hook_in_the_docs_is_the_one_that_runs() -> None:
    text = (EXAMPLES / "own_hook.py").read_text()
    hook = text.partition("# docs: begin\n")[2].partition("\n\n\n# docs: end")[0]
    assert 5 < len(hook.splitlines()) <= 10
    assert hook in (EXAMPLES.parent / "docs" / "hooks.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*OWN} - {"nanogpt.py"}))
def test_alone(name: str) -> None:
    check(name, run(str(EXAMPLES / name)))


@pytest.mark.slow
def test_same_bits_at_any_number_of_ranks() -> None:
    launched = [*LAUNCHER[:-1], "3"]
    script = [str(EXAMPLES / "same_bits.py"), "--epochs", "2"]
    assert run(*launched, *script).splitlines()[-1] == run(*script).splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", FRAMEWORK)
def test_of_a_framework(name: str) -> None:
    if missing := missing_framework(FRAMEWORK[name]):
        skip("frameworks", missing)
    check(name, run(*([] if name in STARTS_RANKS else LAUNCHER), str(EXAMPLES / name)))


@pytest.mark.slow  # that ours runs under torchrun shows integrations/test_torch_patch.py
def test_under_torchrun() -> None:
    check("train_mlp.py", run(*LAUNCHER, str(EXAMPLES / "train_mlp.py")))


@pytest.mark.parametrize(
    "name",
    [
        "train_mlp.py",
        pytest.param("own_hook.py", marks=pytest.mark.slow),
        pytest.param("same_bits.py", marks=pytest.mark.slow),
        pytest.param("recommender.py", marks=pytest.mark.slow),
        pytest.param("nanogpt.py", marks=pytest.mark.slow),
    ],
)
def test_on_two_ranks(name: str, tmp_path: Path) -> None:
    """As ``paceline run`` starts them: they cannot tell the difference (test_run.py)."""
    check(name, run_script(EXAMPLES / name, tmp_path))
