"""Every test cleans up after itself; here it is checked.

A test fails if it leaves behind a thread, a child process (of ours or of the forkserver), a file
descriptor, shared memory (mapped, or a file in /dev/shm), or a changed environment variable. A test
that must leave something says so: ``@pytest.mark.may_leave("environ")``.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import pytest

# What is slow to disappear gets this long before it counts as left behind.
PATIENCE_S = 3.0
# Set by libraries when they are first imported, or by pytest for each test.
IGNORED_VARIABLES = {"PYTEST_CURRENT_TEST", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}

ATTACKS = Path(__file__).parent / "attack"
SHM = Path("/dev/shm")
LINUX = Path("/proc/self/fd").is_dir()

# Shells let what they start in the background ignore Ctrl-C, and children inherit that: tests that
# interrupt a program would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the attacks to ``make test-all``."""
    for item in items:
        if ATTACKS in item.path.parents:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compare the process before and after the test."""
    allowed = {kind for mark in request.node.iter_markers("may_leave") for kind in mark.args}
    looks = {kind: look for kind, look in LOOKS.items() if kind not in allowed}
    before = {kind: look() for kind, look in looks.items()}
    yield
    if left := _wait_clean(looks, before):
        pytest.fail("left behind: " + "; ".join(left), pytrace=False)


def _wait_clean(looks: dict[str, Callable[[], set[Any]]], before: dict[str, set[Any]]) -> list[str]:
    until_s = time.monotonic() + PATIENCE_S
    pause_s = 0.0
    while True:
        left = {kind: look() - before[kind] for kind, look in looks.items()}
        # Shared memory can belong to somebody else's process: asked only when there is some.
        if left.get("shm"):
            left["shm"] = {name for name in left["shm"] if not _is_foreign(name)}
        found = [f"{kind}: {sorted(map(str, items))}" for kind, items in left.items() if items]
        if not found or time.monotonic() > until_s:
            return found
        gc.collect()
        time.sleep(pause_s)
        pause_s = min(0.2, pause_s + 0.02)


def _threads() -> set[threading.Thread]:
    return set(threading.enumerate())


def _environ() -> set[tuple[str, str]]:
    return {(name, value) for name, value in os.environ.items() if name not in IGNORED_VARIABLES}


def _descriptors() -> set[tuple[int, str]]:
    # The fork server and the resource tracker live as long as the session.
    kept = {forkserver._forkserver._forkserver_alive_fd, resource_tracker._resource_tracker._fd}
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the descriptor of this very listing
            continue
        if int(name) not in kept:
            found.add((int(name), target))
    return found


def _children() -> set[str]:
    server = forkserver._forkserver._forkserver_pid
    parents = {os.getpid(), server}
    kept = {server, resource_tracker._resource_tracker._pid}
    return {
        f"pid {pid} ({name})"
        for pid, name, parent in _processes()
        if parent in parents and pid not in kept
    }


def _processes() -> Iterator[tuple[int, str, int]]:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                text = Path(f"/proc/{entry}/stat").read_text()
            except OSError:  # it ended meanwhile
                continue
            head, _, tail = text.rpartition(")")
            yield int(entry), head.partition("(")[2], int(tail.split()[1])


def _shared_memory() -> set[str]:
    names = {f"/dev/shm/{name}" for name in os.listdir(SHM)} if SHM.is_dir() else set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line[73:]
        if path.startswith(("/dev/shm/", "/memfd:")) and "libffi" not in path:
            names.add(path)
    return names


def _is_foreign(name: str) -> bool:
    """Say whether another program holds this file of /dev/shm: not ours to judge."""
    if not name.startswith("/dev/shm/"):
        return False
    ours = {os.getpid(), forkserver._forkserver._forkserver_pid}
    for pid, _, parent in _processes():
        if pid in ours or parent in ours:
            continue
        try:
            if name in Path(f"/proc/{pid}/maps").read_text():
                return True
        except OSError:
            continue
    return False


LOOKS: dict[str, Callable[[], set[Any]]] = {"threads": _threads, "environ": _environ}
if LINUX:
    LOOKS |= {"children": _children, "descriptors": _descriptors, "shm": _shared_memory}
