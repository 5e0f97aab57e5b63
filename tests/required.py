"""What tests need of the system: they skip without it, unless ``PACELINE_REQUIRE`` names it.

CI names what its machine must have (``.ci/run``): there such a test fails, so that no green run has
left out what it seems to show. The Makefile reads the same variable when it installs.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from typing import NoReturn

import pytest
from packaging.requirements import Requirement

VARIABLE = "PACELINE_REQUIRE"
NAMES = {"chromium", "frameworks", "mpirun", "native", "slurm", "wheel"}


def is_required(name: str) -> bool:
    """Whether tests that need it must not be skipped."""
    required = set(os.environ.get(VARIABLE, "").replace(",", " ").split())
    if unknown := required - NAMES:
        raise ValueError(f"{VARIABLE} names {sorted(unknown)}; known are {sorted(NAMES)}")
    return name in required


def skip_without(name: str, missing: str | None) -> pytest.MarkDecorator:
    """Mark tests that need something; ``missing`` says why it is not there, or is empty."""
    if missing and is_required(name):
        return pytest.mark.lacks(f"{missing}; {VARIABLE} names {name}")
    return pytest.mark.skipif(bool(missing), reason=missing or "-")


def skip(name: str, missing: str) -> NoReturn:
    """Skip the test that runs, or let it fail."""
    if is_required(name):
        pytest.fail(f"{missing}; {VARIABLE} names {name}", pytrace=False)
    pytest.skip(missing)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail what :func:`skip_without` would have skipped. A hook of ``tests/conftest.py``, too."""
    for mark in item.iter_markers("lacks"):
        pytest.fail(mark.args[0], pytrace=False)


def needs(framework: str) -> pytest.MarkDecorator:
    """Skip tests without a framework. Nothing is imported: ranks do that, if the test runs."""
    return skip_without("frameworks", missing_framework(framework))


def missing_framework(name: str) -> str:
    """Say why a framework's tests cannot run; empty if it is there, in a version that is tested."""
    if importlib.util.find_spec(name) is None:
        return f"{name} is not installed (make test-all installs it)"
    installed = importlib.metadata.version(name)
    tested = wanted_versions(name)
    if tested.specifier.contains(installed, prereleases=True):
        return ""
    return f"{name} {installed} is installed, and pyproject.toml names {tested}"


def wanted_versions(name: str) -> Requirement:
    """What our extra of that name asks for: ``accelerate<1.16,>=1.15``."""
    for line in importlib.metadata.requires("paceline") or ():
        asked = Requirement(line)
        if asked.name == name and asked.marker and asked.marker.evaluate({"extra": name}):
            asked.marker = None
            return asked
    raise LookupError(f"pyproject.toml has no extra for {name}")
