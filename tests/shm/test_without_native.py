"""No native core: everything works over the inner group, and rank 0 says so."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline.native import extension
from paceline.testing import run_ranks

ROOT = Path(__file__).parents[2]


def test_the_package_imports_without_the_extension() -> None:
    """As if it had never been built."""
    code = """
import sys
sys.modules["paceline.native._native"] = None
import paceline, paceline.shm.backend.process_group
from paceline import DistributedDataParallel
from paceline.native.extension import missing_reason
print(missing_reason())
"""
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100
    )
    assert "install gcc" in found.stdout


def all_reduce() -> tuple[float, list[str], str]:
    extension.native = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        group = dist.new_group(backend="paceline")
    value = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(value, group=group)
    dist.barrier(group=group)
    gathered = [torch.zeros(1) for _ in range(2)]
    dist.all_gather(gathered, value, group=group)
    return float(gathered[1]), [str(w.message) for w in caught], group.refusal


def test_the_backend_works_over_gloo_and_says_so() -> None:
    (first, told, reason), (second, silent, _) = run_ranks(2, all_reduce)
    assert first == second == 3.0
    assert len(told) == 1
    assert reason in told[0]
    assert silent == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tries to build it")
def test_a_compiler_that_fails_does_not_fail_the_build(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", reason="needs setuptools, to build")
    words = ["setup.py", "-q", "build_ext", "--build-lib", str(tmp_path / "lib")]
    found = subprocess.run(
        [sys.executable, *words, "--build-temp", str(tmp_path / "temp")],
        cwd=ROOT,
        env={**os.environ, "CC": "false"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert not list(tmp_path.rglob("*.so"))
    assert "_native" in found.stderr  # it says what it could not build


@pytest.mark.skipif(extension.native is None, reason="needs the native core: a C compiler")
def test_the_extension_uses_the_stable_abi() -> None:
    """One build for every later Python; the free-threaded one has no stable ABI yet."""
    name = Path(extension.native.__file__).name
    assert name == "_native.abi3.so" or not getattr(sys, "_is_gil_enabled", lambda: True)()
