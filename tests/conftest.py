"""Every test cleans up after itself; here it is checked.

A test fails if it leaves behind a thread, a child process (of ours or of the forkserver), a file
descriptor, shared memory (mapped, or a file in /dev/shm), or a changed environment variable. A test
that must leave something says so: ``@pytest.mark.may_leave("environ")``. Only what this process and
its children made counts: other tests may run beside these.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from paceline.launch import fork_server
from paceline.testing.ranks import warm_up
from tests.examples import examples
from tests.required import pytest_runtest_setup

# Hooks that live elsewhere.
__all__ = ["pytest_runtest_setup"]

# What is slow to disappear gets this long before it counts as left behind.
PATIENCE_S = 30.0
# The first looks, at most this long, come without a garbage collection: with torch it takes 0.2 s.
WITHOUT_COLLECTION_S = 0.1
# As many tests are worth a fork server that is warm before the first of them asks for ranks.
MANY = 20
# What does not disappear by itself.
LASTING = {"environ"}
# Set by libraries when they are first imported, or by pytest for each test.
IGNORED_VARIABLES = {
    "PYTEST_CURRENT_TEST",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "TORCHINDUCTOR_CACHE_DIR",
}

TESTS = Path(__file__).parent
ATTACKS = TESTS / "attack"
# The longest of `make test` (`make test ARGS=--durations=0`), longest first.
LONG_FILES = [
    "conformance/test_torch_ddp.py",
    "elastic/test_jobs.py",
    "testing/test_ranks.py",
    "cli/test_demo.py",
    "shm/collectives/test_faults.py",
    "integrations/test_torch_patch.py",
    "conformance/test_torch_ddp_rpc.py",
    "hooks/test_contract.py",
    "observe/stall/test_watchdog.py",
    "shm/contract/test_cases.py",
    "cli/test_run.py",
    "ddp/agree/test_hangs.py",
    "ps/storage/test_faulty_disk.py",
    "hooks/test_training.py",
    "test_gloo_threads.py",
    "faults/test_faults.py",
    "hooks/test_parity.py",
    "shards/test_elastic.py",
    "test_examples.py",
    "ps/storage/test_recovery.py",
    "ddp/agree/test_exit_reason.py",
    "hooks/test_convergence.py",
    "ddp/parity/test_compile.py",
    "shm/backend/test_backend_in_c10d.py",
    "shards/test_same_bits.py",
    "elastic/test_coordinator_dies.py",
    "ddp/agree/test_drift_silence.py",
    "ddp/parity/test_properties.py",
    "elastic/test_data_jobs.py",
    "elastic/test_fault_matrix.py",
    "cli/bench/test_hybrid.py",
    # of `make test-all`
    "cli/test_help.py",
    "cli/test_run_scripts.py",
    "integrations/test_lightning_own.py",
    "integrations/test_launchers.py",
    "elastic/supervised/test_supervisor.py",
    "integrations/test_accelerate_scripts.py",
    "packaging/test_wheel.py",
    "integrations/test_ray.py",
    "benchmarks/test_frameworks.py",
    "shards/test_long.py",
    "ddp/parity/test_pairs.py",
    "benchmarks/test_smoke.py",
    "shm/native_stress/test_sanitizers.py",
    "attack/test_forks.py",
    "elastic/test_hooks.py",
]
SHM = Path("/dev/shm")
LINUX = Path("/proc/self/fd").is_dir()

# Shells let what they start in the background ignore Ctrl-C, and children inherit that: tests that
# interrupt a program would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Else each rank that compiles starts a program that compiles for it, and that imports torch anew.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


# An example takes as long as a busy machine needs, and `make test` has the same examples each time.
# To look for others: make unit ARGS="--hypothesis-profile=random".
hypothesis.settings.register_profile(
    "random",
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "repeatable", hypothesis.settings.get_profile("random"), derandomize=True
)
hypothesis.settings.load_profile("repeatable")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave to ``make test-all`` the attacks, and what wants the machine for itself."""
    for item in items:
        if ATTACKS in item.path.parents or item.get_closest_marker("alone"):
            item.add_marker(pytest.mark.slow)
    if hasattr(config, "workerinput"):  # xdist: its workers take one file after the other
        turns = {path: turn for turn, path in enumerate(in_turn([item.path for item in items]))}
        items.sort(key=lambda item: turns[item.path])


def in_turn(paths: list[Path]) -> list[Path]:
    """LONG_FILES first, then those with many tests: no worker has a long file left at the end."""
    turns = {TESTS / name: turn for turn, name in enumerate(LONG_FILES)}
    sizes = Counter(sorted(paths))
    return sorted(sizes, key=lambda path: (turns.get(path, len(turns)), -sizes[path]))


@pytest.fixture(scope="session", autouse=True)
def warm_fork_server(request: pytest.FixtureRequest) -> None:
    """Start the fork server: thousands of ranks need not import what all of them use.

    In a fixture, because what it writes is then captured.
    """
    if len(request.session.items) > MANY:
        warm_up(["paceline.ddp", "paceline.hooks"])


@pytest.fixture(scope="session", autouse=True)
def freeze_what_is_loaded() -> None:
    """No collection looks through torch and all tests again: that takes 0.2 s."""
    gc.collect()
    gc.freeze()


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
    began_s = time.monotonic()
    pause_s = 0.002
    while True:
        left = {kind: found for kind, look in looks.items() if (found := look() - before[kind])}
        waited_s = time.monotonic() - began_s
        if left.keys() <= LASTING or waited_s > PATIENCE_S:
            return [f"{kind}: {sorted(map(str, found))}" for kind, found in left.items()]
        if waited_s > WITHOUT_COLLECTION_S:
            gc.collect()
        time.sleep(pause_s)
        pause_s = min(0.2, 2 * pause_s)


def _threads() -> set[threading.Thread]:
    return set(threading.enumerate())


def _environ() -> set[tuple[str, str]]:
    return {(name, value) for name, value in os.environ.items() if name not in IGNORED_VARIABLES}


def _descriptors() -> set[tuple[int, str]]:
    # The fork servers and the resource tracker live as long as the session.
    kept = {forkserver._forkserver._forkserver_alive_fd, resource_tracker._resource_tracker._fd}
    if fork_server._shared is not None:
        kept.add(fork_server._shared.fileno())
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the descriptor of this very listing
            continue
        if int(name) not in kept:
            found.add((int(name), target))
    return found


def own_processes() -> set[int]:
    """The children of this process and of the fork servers (ours, and multiprocessing's)."""
    shared = fork_server._shared
    servers = {forkserver._forkserver._forkserver_pid, shared.pid if shared else None} - {None}
    found = _children_of(os.getpid()).union(*map(_children_of, servers))
    return found - servers - {resource_tracker._resource_tracker._pid}


def _children_of(pid: int) -> set[int]:
    found = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found |= {int(word) for word in path.read_text().split()}
        except OSError:  # the thread ended meanwhile
            continue
    return found


def _children() -> set[str]:
    return {f"pid {pid} ({_program(pid)})" for pid in own_processes()}


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "ended meanwhile"


def _shared_memory() -> set[str]:
    """What is mapped; and files in /dev/shm that name one of our processes, as torch's do."""
    maps = Path("/proc/self/maps").read_text()
    found = set(re.findall(r" (/(?:dev/shm/|memfd:(?!libffi)).*)", maps))
    files = {name: set(re.findall(r"\d+", name)) for name in os.listdir(SHM)}
    if any(files.values()):
        ours = {str(pid) for pid in {os.getpid(), *own_processes()}}
        found |= {str(SHM / name) for name, numbers in files.items() if numbers & ours}
    return found


LOOKS: dict[str, Callable[[], set[Any]]] = {"threads": _threads, "environ": _environ}
if LINUX:
    LOOKS |= {"children": _children, "descriptors": _descriptors, "shm": _shared_memory}
