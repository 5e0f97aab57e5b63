"""What CI requires is not skipped: a run without it is red."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.native.extension import missing_reason
from tests.required import (
    NAMES,
    VARIABLE,
    is_required,
    missing_framework,
    skip_without,
    wanted_versions,
)

ROOT = Path(__file__).parents[1]
TESTS = """
from tests.required import skip, skip_without

@skip_without("slurm", "needs slurmd")
def test_marked(): raise AssertionError("it runs")

@skip_without("mpirun", "")
def test_that_has_all(): pass

def test_that_finds_out(): skip("wheel", "needs PyPI")
"""


def outcome(folder: Path, required: str) -> str:
    """What pytest says of these tests."""
    (folder / "test_it.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = lacks(reason)\n")
    quick = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    options = ["-p", "tests.required", "-p", "no:cacheprovider", "-q", "--tb=line"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, "test_it.py"],
        cwd=folder,
        env={**os.environ, **quick, VARIABLE: required, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    ).stdout


def test_what_is_missing_skips(tmp_path: Path) -> None:
    assert "1 passed, 2 skipped" in outcome(tmp_path, "")


def test_what_is_required_fails(tmp_path: Path) -> None:
    said = outcome(tmp_path, "slurm,wheel,mpirun")
    assert "1 failed, 1 passed, 1 error" in said, "an error is a failure outside of the test itself"
    assert "needs slurmd; PACELINE_REQUIRE names slurm" in said
    assert "needs PyPI; PACELINE_REQUIRE names wheel" in said


def test_a_name_that_nothing_checks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "slurm, framework")
    with pytest.raises(ValueError, match=r"names \['framework'\]; known are"):
        is_required("slurm")


def test_ci_requires_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """What .ci/run names is what tests ask for."""
    text = (ROOT / ".ci" / "run").read_text()
    _, _, rest = text.partition(f"{VARIABLE}-")
    assert set(rest.partition("}")[0].split(",")) == NAMES


@skip_without("native", missing_reason())
def test_the_native_core_is_there() -> None:
    """Hundreds of tests skip without it; here that is a failure in CI."""
    assert missing_reason() is None


def test_a_framework_of_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = wanted_versions("lightning")
    (oldest,) = [each.version for each in asked.specifier if each.operator == ">="]
    told = {oldest: "", "99.0": f"lightning 99.0 is installed, and pyproject.toml names {asked}"}
    monkeypatch.setattr("importlib.util.find_spec", lambda _: "found")
    for version, said in told.items():
        monkeypatch.setattr("importlib.metadata.version", lambda _, version=version: version)
        assert missing_framework("lightning") == said


def test_a_framework_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert missing_framework("ray") == "ray is not installed (make test-all installs it)"
