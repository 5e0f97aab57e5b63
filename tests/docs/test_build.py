"""The docs build without a warning: pages are in a table of contents, links lead somewhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_build_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="Sphinx is not installed: make docs installs it")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        "-d",
        str(tmp_path / "d"),
    ]
    built = subprocess.run(
        [*command, str(ROOT / "docs"), str(tmp_path / "html")], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    assert "DistributedDataParallel" in (tmp_path / "html" / "api" / "ddp.html").read_text()
