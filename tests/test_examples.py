"""Every script in examples/ runs, alone and under torchrun, and does what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
DEADLINE_S = 250

# What the last line must look like; the number in it must be below the limit.
EXPECTED = {
    "own_hook.py": (r"error of the slope (\d\.\d+)", 0.2),
    # At chance, 0.37 would be missing.
    "recommender.py": (r"AUC 0\.\d+; chance is 0\.500, possible 0\.\d+: missing (-?\d\.\d+)", 0.04),
    "train_mlp.py": (r"epoch +\d+ +loss (\d\.\d+)", 0.02),
}


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
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(EXPECTED)


def test_the_hook_in_the_docs_is_the_one_that_runs() -> None:
    text = (EXAMPLES / "own_hook.py").read_text()
    hook = text.partition("# docs: begin\n")[2].partition("\n\n\n# docs: end")[0]
    assert 5 < len(hook.splitlines()) <= 10
    assert hook in (EXAMPLES.parent / "docs" / "hooks.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_alone(name: str) -> None:
    check(name, run(str(EXAMPLES / name)))


@pytest.mark.parametrize("name", EXPECTED)
def test_under_torchrun(name: str) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    check(name, run(*launcher, str(EXAMPLES / name)))
