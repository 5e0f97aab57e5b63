"""Locks that threads wait for are named on every Python: bytecode differs from one to the next."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.observe.stall import locks

SCRIPT = Path(__file__).with_name("waits_for_locks.py")
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14", "3.15")


def find_python(version: str) -> str | None:
    """A Python that runs; one of pyenv's shims may only say that it is not chosen."""
    if tuple(map(int, version.split("."))) == sys.version_info[:2]:
        return sys.executable
    installed = Path.home().glob(f".pyenv/versions/{version}.*/bin/python")
    for candidate in (f"python{version}", *map(str, sorted(installed))):
        try:
            found = subprocess.run(
                [candidate, "-c", "import sys; print(*sys.version_info[:2], sep='.')"],
                capture_output=True,
                text=True,
                timeout=60,
            )
        except OSError:
            continue
        if found.returncode == 0 and found.stdout.strip() == version:
            return candidate
    return None


@pytest.mark.parametrize("version", VERSIONS)
def test_each_way_to_wait(version: str) -> None:
    python = find_python(version)
    if python is None:
        pytest.skip(f"Python {version} is not installed")
    command = [python, "-I", str(SCRIPT), str(locks.__file__)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {}


@pytest.mark.parametrize(
    ("opcode", "argument", "names"),
    [
        ("LOAD_FAST", "a", ["a"]),
        ("LOAD_FAST_CHECK", "a", ["a"]),
        ("LOAD_FAST_LOAD_FAST", ("a", "b"), ["a", "b"]),
        ("LOAD_FAST_BORROW", "a", ["a"]),  # 3.14, as the next
        ("LOAD_FAST_BORROW_LOAD_FAST_BORROW", ("a", "b"), ["a", "b"]),
        ("STORE_FAST_LOAD_FAST", ("a", "b"), ["b"]),
        ("LOAD_FROM_DICT_OR_DEREF", "a", ["a"]),
        ("LOAD_GLOBAL", "a", ["a"]),
        ("LOAD_CONST", "a", []),
        ("LOAD_SMALL_INT", 1, []),
        ("STORE_FAST", "a", []),
    ],
)
def test_what_an_instruction_loads(opcode: str, argument: Any, names: list[str]) -> None:
    assert locks.names_loaded(opcode, argument) == names
