"""The checks in conftest.py see what they are there to see."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import LINUX, LONG_FILES, LOOKS, SHM, TESTS, in_turn

reads_proc = pytest.mark.skipif(not LINUX, reason="reads /proc")
LETTERS = str.maketrans("0123456789", "ghijklmnop")  # a number could be that of a process


@contextlib.contextmanager
def thread() -> Iterator[None]:
    stop = threading.Event()
    extra = threading.Thread(target=stop.wait)
    extra.start()
    yield
    stop.set()
    extra.join()


@contextlib.contextmanager
def child() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield
        process.kill()


@contextlib.contextmanager
def descriptor() -> Iterator[None]:
    with Path(os.devnull).open() as _:
        yield


@contextlib.contextmanager
def mapping() -> Iterator[None]:
    fd = os.memfd_create("paceline-test")
    os.ftruncate(fd, 4096)
    with mmap.mmap(fd, 4096):
        os.close(fd)
        yield


@contextlib.contextmanager
def file_in_shm() -> Iterator[None]:
    path = SHM / f"paceline-test-{os.getpid()}"
    path.touch()
    yield
    path.unlink()


@contextlib.contextmanager
def variable() -> Iterator[None]:
    os.environ["PACELINE_LEFT"] = "1"
    yield
    del os.environ["PACELINE_LEFT"]


@reads_proc
@pytest.mark.parametrize(
    ("kind", "leak"),
    [
        ("threads", thread),
        ("children", child),
        ("descriptors", descriptor),
        ("shm", mapping),
        ("shm", file_in_shm),
        ("environ", variable),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_a_leak_is_seen(kind: str, leak: contextlib.AbstractContextManager[None]) -> None:
    before = LOOKS[kind]()
    with leak():
        assert len(LOOKS[kind]() - before) == 1
    assert LOOKS[kind]() == before


@reads_proc
@pytest.mark.parametrize("name", ["of another program", "torch_1_of_another_process"])
def test_what_others_have_in_shared_memory_is_not_seen(name: str) -> None:
    before = LOOKS["shm"]()
    path = SHM / f"{name} {uuid.uuid4().hex.translate(LETTERS)}"
    path.touch()
    try:
        assert LOOKS["shm"]() == before
    finally:
        path.unlink()


@reads_proc
def test_a_test_that_leaks_fails(tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    for name in ("conftest.py", "examples.py", "required.py"):
        shutil.copy(Path(__file__).with_name(name), tests)
    (tests / "test_it.py").write_text(
        "import os, pytest\n"
        "def test_leaks(): os.environ['LEFT'] = '1'\n"
        "@pytest.mark.may_leave('environ')\n"
        "def test_may(): os.environ['LEFT'] = '2'\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "left behind: environ" in result.stdout
    assert "2 passed" in result.stdout  # pytest counts a failing teardown as an error beside a pass
    assert "1 error" in result.stdout


def test_workers_begin_with_the_long_files() -> None:
    few, many = TESTS / "few.py", TESTS / "many.py"
    long = [TESTS / name for name in LONG_FILES]
    assert [path for path in long if not path.exists()] == []
    assert in_turn([few, many, *reversed(long), many]) == [*long, many, few]
