"""The ring under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer.

``stress.c`` says what is run. The mutations show that a weaker order would be seen.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[4] / "src" / "paceline" / "native" / "ps"
STRESS = Path(__file__).with_name("stress.c")
COMPILER = shutil.which(os.environ.get("CC", "cc"))
FLAGS = ("-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Wno-unknown-warning-option")
# -Wno-tsan: it does not follow fences. They are not what data hang on, only who wakes whom.
THREAD = ("-fsanitize=thread", "-Wno-tsan")
ADDRESS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="needs a C compiler: cc, or what CC names"),
]


def run(binary: Path, messages: int) -> tuple[int, str]:
    """Return the exit code and what was written."""
    # An address space that is too random is beyond the thread sanitizer of older compilers.
    fixed = [path, "-R"] if (path := shutil.which("setarch")) else []
    environ = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1:exitcode=66"}
    command = [*fixed, str(binary), str(messages)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environ)
    return done.returncode, done.stdout + done.stderr


def compiled(ring: Path, directory: Path, flags: Sequence[str]) -> Path:
    binary = directory / "stress"
    command = [str(COMPILER), *FLAGS, *flags, f"-I{NATIVE}", str(STRESS), str(ring)]
    command += ["-pthread", "-o", str(binary)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    if done.returncode != 0 and "cannot find" in done.stderr:
        pytest.skip(f"this compiler cannot link {flags[0]}: {done.stderr.splitlines()[-1:]}")
    assert done.returncode == 0, done.stderr
    code, text = run(binary, 0)
    if code != 0:
        pytest.skip(f"a program with {flags[0]} does not start here: {text.splitlines()[:1]}")
    return binary


@pytest.mark.parametrize("flags", [THREAD, ADDRESS], ids=str)
def test_is_clean(tmp_path: Path, flags: tuple[str, ...]) -> None:
    code, text = run(compiled(NATIVE / "ring.c", tmp_path, flags), 60_000)
    assert code == 0, text


@pytest.mark.parametrize(
    ("order", "weaker"),
    [
        (
            "&ring->words->written, ring->position, memory_order_release",
            "&ring->words->written, ring->position, memory_order_relaxed",
        ),
        (
            "&ring->words->taken, ring->position, memory_order_release",
            "&ring->words->taken, ring->position, memory_order_relaxed",
        ),
    ],
)
def test_a_weaker_order_is_seen(tmp_path: Path, order: str, weaker: str) -> None:
    text = (NATIVE / "ring.c").read_text()
    assert text.count(order) == 1
    mutant = tmp_path / "ring.c"
    mutant.write_text(text.replace(order, weaker))
    code, found = run(compiled(mutant, tmp_path, THREAD), 60_000)
    assert code == 66, found
    assert "data race" in found
