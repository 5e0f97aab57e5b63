"""Names of ``paceline.ps`` are what they are, in whichever order they are first used."""

from __future__ import annotations

import subprocess
import sys


def test_modules_before_connect() -> None:
    code = (
        "from paceline.ps import EmbeddingBag, connect, local\n"
        "print(connect.__name__, local.__name__)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.split() == ["connect", "local"]
