"""A program that ends right after its last collective ends well."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.nn as nn

from paceline import DistributedDataParallel, gloo_threads
from paceline.native.extension import missing_reason
from paceline.testing import run_ranks

PROGRAM = Path(__file__).parent / "ends_at_once.py"
ABORTED = -6
DEADLINE_S = 250

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="needs /proc to see what threads do"
)


OTHERS = ("later", "waited", "destroyed", "hook")


def run(case: str, folder: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(PROGRAM), case, str(folder / "store")]
    return subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S)


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python 3.14 lets such threads hang")
def test_torch_alone_dies(tmp_path: Path) -> None:
    """What the module is for. Fails once torch lets gloo's threads end well by itself."""
    for _ in range(3):  # on a busy machine gloo may not come as far as it should
        ended = run("torch", tmp_path)
        if ended.returncode == ABORTED:
            break
        (tmp_path / "store").unlink(missing_ok=True)
    assert ended.returncode == ABORTED
    assert "terminate called without an active exception" in ended.stderr


@pytest.mark.parametrize(
    "case",
    [
        "wrapper",
        *(pytest.param(case, marks=pytest.mark.slow) for case in OTHERS),
    ],
)
def test_ends_well(case: str, tmp_path: Path) -> None:
    ended = run(case, tmp_path)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.skipif(missing_reason() is not None, reason=str(missing_reason()))
@pytest.mark.slow
def test_a_callback_of_the_group_may_take_its_time(tmp_path: Path) -> None:
    ended = run("group", tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "rank 1 ended with 0\n", ended.stderr


def asks_of_wrapper() -> int:
    DistributedDataParallel(nn.Linear(2, 2))
    return gloo_threads.wait_for_gloo_at_exit.cache_info().currsize


def asks_of_group() -> int:
    before = gloo_threads.wait_for_gloo_at_exit.cache_info().currsize
    dist.new_group(backend="paceline")
    return gloo_threads.wait_for_gloo_at_exit.cache_info().currsize - before


@pytest.mark.slow
def test_wrapper_and_group_ask_for_it() -> None:
    assert run_ranks(1, asks_of_wrapper) == [1]
    assert run_ranks(2, asks_of_group) == [1, 1]


DESTROYS = """
import gc, sys
import torch, torch.distributed as dist
from paceline import DistributedDataParallel, gloo_threads

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
model = DistributedDataParallel(torch.nn.Linear(2, 2))
model(torch.ones(1, 2)).sum().backward()
print(len(gloo_threads.gloo_workers()) > 0)
del model
gc.collect()
dist.destroy_process_group()
print(len(gloo_threads.gloo_workers()))
"""


def test_a_destroyed_group_has_no_threads(tmp_path: Path) -> None:
    """torch keeps it for ever if torch.distributed.nn is first imported while there is a group."""
    words = [sys.executable, "-c", DESTROYS, str(tmp_path / "store")]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.stdout.split() == ["True", "0"], ended.stderr


def test_waits_for_a_thread_that_is_at_work() -> None:
    is_named, may_end = threading.Event(), threading.Event()

    def pose_as_worker() -> None:
        task = Path(f"/proc/self/task/{threading.get_native_id()}")
        (task / "comm").write_text(gloo_threads.WORKER_NAME)
        is_named.set()
        while not may_end.is_set():
            hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)  # without the interpreter lock

    thread = threading.Thread(target=pose_as_worker)
    thread.start()
    try:
        assert is_named.wait(60)
        assert len(gloo_threads.gloo_workers()) == 1
        assert not gloo_threads.wait_for_gloo(timeout_s=0.1)
        threading.Timer(0.1, may_end.set).start()
        assert gloo_threads.wait_for_gloo(timeout_s=60)
    finally:
        may_end.set()
        thread.join(60)
    assert gloo_threads.gloo_workers() == []
