"""``python -m benchmarks frameworks``: every framework, theirs and ours, in one command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.frameworks import FRAMEWORKS
from tests.required import needs

ROOT = Path(__file__).parents[2]
DEADLINE_S = 880
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(DEADLINE_S + 20),
    *map(needs, sorted({framework.package for framework in FRAMEWORKS.values()})),
]


def test_each_is_measured(tmp_path: Path) -> None:
    """In a process of its own: Ray's threads and variables end with it."""
    numbers = tmp_path / "out.json"
    words = ["frameworks", "--rounds", "2", "--steps", "2", "--json", str(numbers)]
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert result.returncode == 0, result.stdout + result.stderr[-5000:]
    found = json.loads(numbers.read_text())
    for name, framework in FRAMEWORKS.items():
        for side in ("theirs_ms", "ours_ms"):
            assert [len(times) for times in found[name][side]] == [2, 2]
        low, value, high = (found[name]["ratio"][key] for key in ("low", "value", "high"))
        assert 0 < low <= value <= high
        assert framework.title in result.stdout
