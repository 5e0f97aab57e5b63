"""Real ranks, one of them late for a real reason: the report must name it, by the kernel's counts.

Ranks are pinned to cores of their own, so that one of them can be kept from its core. What else the
machine does would count, too: these are ``alone``.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline import DistributedDataParallel
from paceline.report.analysis import Suspect, analyse
from paceline.report.causes import Cause
from paceline.report.run import read_run
from paceline.report.wording import warnings
from paceline.testing import run_ranks
from tests.system import cpu_cgroup

pytestmark = [pytest.mark.slow, pytest.mark.alone]

STEPS = 40
CULPRIT = 1
PAGES = 100
"""Read from disk in a step."""

Work = Callable[[int], None]
CORES = sorted(os.sched_getaffinity(0))


def no_work(step: int) -> None:
    """Between forward and backward."""


def train(folder: Path, prepare: Callable[[], Work]) -> None:
    """Each rank on a core of its own; the culprit prepares something first."""
    os.environ["PACELINE_RUN_DIR"] = str(folder)
    rank = torch.distributed.get_rank()
    os.sched_setaffinity(0, {CORES[rank]})
    torch.set_num_threads(1)
    work = prepare() if rank == CULPRIT else no_work
    ddp = DistributedDataParallel(nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)
    for step in range(STEPS):
        loss = ddp(torch.ones(512, 512)).square().mean()
        work(step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def suspect(folder: Path, prepare: Callable[[], Work]) -> Suspect:
    run_ranks(2, train, folder, prepare, timeout_s=240)
    found = analyse(read_run(folder)).analysis
    assert not [text for text in warnings(found) if "threads" in text and "ranks with" in text]
    assert found.culprit is not None
    assert found.culprit.straggler.rank == CULPRIT
    return found.culprit


@pytest.fixture(autouse=True)
def cores() -> None:
    if len(CORES) < 2:
        pytest.skip("needs a core for each of two ranks")


BURN = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
print("burns", flush=True)
while os.getppid() == int(sys.argv[2]):
    pass
"""


@contextlib.contextmanager
def busy(core: int, loops: int) -> Iterator[None]:
    """Other programs on one core. They burn there already: no import of theirs disturbs ranks.

    Each is a session of its own, as programs of other users are: a kernel with autogroups gives
    every session the same share, so all of one session together would take only half of the core.
    """
    words = [sys.executable, "-S", "-c", BURN, str(core), str(os.getpid())]
    with contextlib.ExitStack() as stack:
        for _ in range(loops):
            other = stack.enter_context(
                subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True)
            )
            stack.callback(other.kill)
            assert other.stdout is not None
            assert other.stdout.readline() == b"burns\n"
        yield


def nothing() -> Work:
    return no_work


def test_others_use_its_core(tmp_path: Path) -> None:
    with busy(CORES[CULPRIT], loops=7):
        found = suspect(tmp_path, nothing)
    assert found.diagnosis.cause is Cause.NO_CORE


def too_many_threads() -> Work:
    torch.set_num_threads(16)
    return no_work


def test_more_threads_than_cores(tmp_path: Path) -> None:
    found = suspect(tmp_path, too_many_threads)
    assert found.diagnosis.cause is Cause.TOO_MANY_THREADS
    assert "16 threads on 1 core; lower OMP_NUM_THREADS" in found.diagnosis.text


class Quota:
    """Move the rank into a cgroup."""

    def __init__(self, group: Path) -> None:
        self.group = group

    def __call__(self) -> Work:
        (self.group / "cgroup.procs").write_text("0")
        return no_work


def test_a_quota(tmp_path: Path) -> None:
    with cpu_cgroup(quota_us=20_000, period_us=100_000) as group:
        found = suspect(tmp_path, Quota(group))
    assert found.diagnosis.cause is Cause.THROTTLED


class ReadsPages:
    """Read pages of a file that are not in memory, one by one: each is a major fault."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self) -> Work:
        pages = self.path.stat().st_size // mmap.PAGESIZE
        order = random.Random(0).sample(range(pages), pages)

        def read(step: int) -> None:
            with self.path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            with memory:
                memory.madvise(mmap.MADV_RANDOM)  # no reading ahead
                for page in order[step * PAGES : (step + 1) * PAGES]:
                    memory[page * mmap.PAGESIZE]

        return read


def test_pages_from_disk(tmp_path: Path) -> None:
    """As after swapping; to swap for real would take all memory of the machine."""
    path = tmp_path / "data"
    path.write_bytes(os.urandom((STEPS + 1) * PAGES * mmap.PAGESIZE))
    with path.open("rb") as file:
        os.fsync(file.fileno())
    read, before = ReadsPages(path)(), resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    began = time.perf_counter()
    read(STEPS)
    if resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before < PAGES // 2:
        pytest.skip(f"pages of {path} stay in memory: no disk, or a file system that keeps them")
    if time.perf_counter() - began < PAGES * 50e-6:
        pytest.skip("this disk is about as fast as memory")
    found = suspect(tmp_path / "run", ReadsPages(path))
    assert found.diagnosis.cause is Cause.PAGING
