from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from paceline.torch_private.versions import complaint_about


@pytest.mark.parametrize(
    "version", ["2.13.0", "2.13.0+cpu", "2.14.1", "2.15.0+cu132", "2.15.0a0+git"]
)
def test_what_was_tested_is_not_mentioned(version: str) -> None:
    assert complaint_about(version) == ""


@pytest.mark.parametrize(
    ("version", "how"), [("2.12.1", "older"), ("2.16.0", "newer"), ("3.0", "newer")]
)
def test_others_are_named_with_the_remedy(version: str, how: str) -> None:
    text = complaint_about(version)
    assert f"torch {version} is {how}" in text
    assert '"torch>=2.13,<2.16"' in text


# What kept torch 2.12.1 from training: it came with 2.13.
OLDER = """
from torch.autograd.function import BackwardCFunction
del BackwardCFunction.apply_boxed
"""


@pytest.mark.parametrize(
    ("version", "how", "changed"), [("2.12.1", "older", OLDER), ("2.99.0", "newer", "")]
)
def test_is_said_once(version: str, how: str, changed: str) -> None:
    program = f"""
import torch
torch.__version__ = {version!r}
{changed}
import paceline
paceline.DistributedDataParallel
import paceline.nn, paceline.hooks, paceline.dp
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count(f"torch {version} is {how}") == 1


def test_names_that_are_gone_are_told_of_with_what_needs_them() -> None:
    text = complaint_about("2.15.0", {"torch._C._gone": "ddp.join()", "torch._too": "ps"})
    assert "torch 2.15.0 does not have" in text
    assert "torch._C._gone (ddp.join()); torch._too (ps)" in text
    assert '"torch>=2.13,<2.16"' in text


def test_this_torch_is_one_of_them() -> None:
    assert complaint_about(torch.__version__) == ""
