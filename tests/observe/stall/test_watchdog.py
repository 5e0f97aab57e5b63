"""The watchdog in ranks: no thread left, none in a child, none without a folder, no false alarm."""

from __future__ import annotations

import contextlib
import errno
import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline import DistributedDataParallel as DDP
from paceline.observe.records import Status
from paceline.observe.ring import read_status
from paceline.observe.stall import account as account_module
from paceline.observe.stall import claims as claims_module
from paceline.observe.stall import views as views_module
from paceline.observe.stall import watchdog as watchdog_module
from paceline.observe.stall.budget import Budget, WaitKind
from paceline.testing import run_ranks
from tests.ddp.compare import batch
from tests.ddp.models import mlp

DEADLINE_S = 120.0  # only ends a hang


def train(ddp: DDP, steps: int) -> None:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)
    for step in range(steps):
        optimizer.zero_grad()
        ddp(batch(step)).square().mean().backward()
        optimizer.step()


def watchdogs() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "paceline-watchdog"]


def lifetime() -> dict[str, Any]:
    found: dict[str, Any] = {}
    ddp = DDP(mlp(4))
    second = DDP(mlp(4))
    train(ddp, 2)
    found["two wrappers"] = len(watchdogs())
    pid = os.fork()
    if pid == 0:
        os._exit(len(watchdogs()))
    found["child"] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    del ddp, second
    gc.collect()
    found["none"] = len(watchdogs())
    third = DDP(mlp(4))
    train(third, 2)
    found["again"] = len(watchdogs())
    return found


def test_one_thread_as_long_as_there_are_wrappers(tmp_path: Path) -> None:
    for found in run_ranks(2, lifetime, env={"PACELINE_RUN_DIR": str(tmp_path)}):
        assert found == {"two wrappers": 1, "child": 0, "none": 0, "again": 1}


def test_no_folder_no_watchdog() -> None:
    def on_rank() -> int:
        ddp = DDP(mlp(4))
        train(ddp, 2)
        return len(watchdogs())

    assert run_ranks(2, on_rank, env={"PACELINE_RUN_DIR": None}) == [0, 0]


def until_there(path: Path) -> None:
    """Wait for a file that another process makes."""
    until_s = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < until_s, f"{path} did not come"
        time.sleep(0.01)


def stalls(folder: str) -> tuple[int, list[str]]:
    """Rank 1 is late, until rank 0's watchdog has looked into a folder that is gone."""
    looked, moved = (Path(folder).with_name(name) for name in ("looked", "moved"))

    def read(path: Path) -> Status:
        try:
            return read_status(path)
        except OSError:
            looked.touch()
            raise

    ddp = DDP(mlp(4))
    train(ddp, 2)
    dist.barrier()
    if dist.get_rank() == 0:
        os.rename(folder, moved)
        watchdog_module.read_status = read
    dist.barrier()
    before = stall_files(str(moved))  # a busy machine may have stalled already
    if dist.get_rank() == 1:
        until_there(looked)
    train(ddp, 3)
    return ddp.stats().steps, before


def test_a_folder_that_is_gone_costs_the_report_not_the_training(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    env = {"PACELINE_RUN_DIR": str(folder), "PACELINE_STALL_AFTER": "0.5"}
    found = run_ranks(2, stalls, str(folder), env=env)
    assert [steps for steps, _ in found] == [5, 5]
    assert stall_files(str(tmp_path / "moved")) == found[0][1]
    assert not folder.exists()


def full_disk(folder: str) -> dict[str, Any]:
    """From some step on no file can be written; then rank 1 is late."""
    ddp = DDP(mlp(4))
    train(ddp, 5)
    dist.barrier()
    said: list[str] = []
    told = Path(folder).with_name("told")

    def say(text: str) -> None:
        said.append(text)
        if "between two steps" in text:
            told.touch()

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for module in (account_module, claims_module, views_module, watchdog_module):
        for name in ("write_whole", "write_json"):
            if hasattr(module, name):
                setattr(module, name, fail)
    watchdog_module._print = say
    dist.barrier()
    before = stall_files(folder)  # a busy machine may have stalled already
    if dist.get_rank() == 1:
        until_there(told)
    train(ddp, 3)
    return {"steps": ddp.stats().steps, "said": said, "before": before}


def stall_files(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).glob("stall-*.txt"))


def test_a_full_disk_costs_the_file_not_the_report_nor_the_training(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    env = {"PACELINE_RUN_DIR": folder, "PACELINE_STALL_AFTER": "0.5"}
    found = run_ranks(2, full_disk, folder, env=env)
    assert [each["steps"] for each in found] == [8, 8]
    assert stall_files(folder) == found[0]["before"]
    told = [t for each in found for t in each["said"] if re.search(r"Stall \d+: Rank 1", t)]
    assert any("between two steps" in text for text in told), found
    assert not any("holds the GIL" in text for text in told), "nobody was asked"


def set_limits(limits_s: dict[WaitKind, float]) -> None:
    """In a rank: learned budgets of these sizes; the others are infinite."""
    Budget.limit_s = lambda _, kind: limits_s.get(kind, 1e6)  # type: ignore[method-assign]


def learned(kind: str, folder: str) -> bool:
    """Rank 1 is late in this way: does rank 0 report it, or judge it and say nothing?

    A wait of 0.5 s in a step is too long, but only while rank 1 is late on purpose.
    """
    is_late, is_judged = Path(folder, "late"), Path(folder, "judged")

    def limit_s(_: Budget, asked: WaitKind) -> float:
        if asked is WaitKind.NOBODY_WAITS or not is_late.exists() or is_judged.exists():
            return 1e6
        if asked is WaitKind.IN_STEP:
            return 0.5
        is_judged.touch()  # it has waited for longer than 0.5 s, and this is asked then only
        return 1e6

    def be_late(*_: Any) -> None:
        if dist.get_rank() == 1 and to_come:
            to_come.clear()
            is_late.touch()
            until_s = time.monotonic() + DEADLINE_S
            while not (is_judged.exists() or report.exists()):
                assert time.monotonic() < until_s, "nobody judged"
                time.sleep(0.01)

    to_come: list[str] = []
    report = Path(folder, "stall-1.txt")
    Budget.limit_s = limit_s  # type: ignore[method-assign]
    model = mlp(4)
    if kind == "forward":
        model[0].register_forward_pre_hook(be_late)
    ddp = DDP(model)
    train(ddp, 5)
    to_come.append(kind)
    if kind == "input":
        be_late()
    if kind == "evaluation" and dist.get_rank() == 1:
        model[0].register_forward_pre_hook(be_late)
        with torch.no_grad():
            ddp(batch(0))
    train(ddp, 3)
    return report.exists()


@pytest.mark.parametrize("kind", ["forward", "input", "evaluation"])
def test_how_long_it_waits_depends_on_what_the_awaited_rank_does(kind: str, tmp_path: Path) -> None:
    folder = str(tmp_path)
    found = run_ranks(2, learned, kind, folder, env={"PACELINE_RUN_DIR": folder})
    assert found == [kind == "forward"] * 2


def stopped(at: int, folder: str) -> bool:
    """With learned budgets of another size: is a rank reported that is stopped between steps?"""
    set_limits({WaitKind.IN_STEP: 0.5})
    ddp = DDP(mlp(4))
    train(ddp, at)
    if dist.get_rank() == 1:
        # A process of its own lets it go on: after the report, or in the end.
        with subprocess.Popen([sys.executable, "-c", GO_ON, folder, str(os.getpid())]):
            os.kill(os.getpid(), signal.SIGSTOP)
    train(ddp, 2)
    return any("is stopped" in path.read_text() for path in Path(folder).glob("stall-*.txt"))


GO_ON = """
import os, pathlib, signal, sys, time
folder, pid, until_s = pathlib.Path(sys.argv[1]), int(sys.argv[2]), time.monotonic() + 60
while time.monotonic() < until_s:
    if any("is stopped" in path.read_text() for path in folder.glob("stall-*.txt")):
        break
    time.sleep(0.05)
os.kill(pid, signal.SIGCONT)
"""


@pytest.mark.parametrize("at", [2, 6])
def test_a_rank_that_is_stopped_is_no_rank_that_evaluates(at: int, tmp_path: Path) -> None:
    """Neither is one that is stopped in the first steps one that compiles."""
    folder = str(tmp_path)
    env = {"PACELINE_RUN_DIR": folder}
    assert run_ranks(2, stopped, at, folder, env=env, timeout_s=120) == [True, True]


class SlowSamples(torch.utils.data.Dataset[torch.Tensor]):
    """The third sample takes until a stall is reported."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        until_s = time.monotonic() + 60
        while index == 2 and not stall_files(self.folder) and time.monotonic() < until_s:
            time.sleep(0.05)
        return batch(index)[0]


def stuck_in_loader(folder: str, is_learned: bool) -> str:
    """All ranks wait for their loaders, and no rank for another; two ranks accumulate."""
    if is_learned:
        set_limits({WaitKind.NOBODY_WAITS: 0.5})
    ddp = DDP(mlp(4))
    with ddp.no_sync() if dist.get_world_size() == 2 else contextlib.nullcontext():
        for inputs in torch.utils.data.DataLoader(SlowSamples(folder), batch_size=1):
            ddp(inputs).square().mean().backward()
    return Path(folder, "stall-1.txt").read_text()


@pytest.mark.parametrize(("world", "is_learned"), [(1, False), (2, True)])
def test_a_stall_where_no_rank_waits_for_another(
    world: int, is_learned: bool, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    env = {"PACELINE_RUN_DIR": folder, "PACELINE_STALL_AFTER": None if is_learned else "0.5"}
    texts = run_ranks(world, stuck_in_loader, folder, is_learned, env=env, timeout_s=120)
    first = texts[0].split("\n", 1)[0]
    words = "No rank waits for another; rank " if world == 2 else "Rank 0 (pid "
    assert first.startswith(f"Stall 1: {words}"), texts[0]
    assert "waiting for the data loader" in first
    assert "test_watchdog.py" in first
    assert ("is meant to take so long, nothing is wrong" in first) is is_learned
    assert "in __getitem__" in texts[0], "its stack"


def clean(steps: int) -> int:
    ddp = DDP(mlp(4))
    train(ddp, steps)
    return ddp.stats().steps


@pytest.mark.alone
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stall_after", [None, "2"], ids=["learned", "2 s"])
def test_no_false_alarm_on_a_busy_machine(stall_after: str | None, tmp_path: Path) -> None:
    """Clean steps beside twice as many busy processes as there are cores.

    With both budgets with which tests/faults finds twelve faults of twelve.
    """
    steps = 10_000 if os.environ.get("PACELINE_LONG") else 2_500
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(2 * multiprocessing.cpu_count())
    ]
    try:
        env = {"PACELINE_RUN_DIR": str(tmp_path), "PACELINE_STALL_AFTER": stall_after}
        assert run_ranks(3, clean, steps, env=env, timeout_s=800) == [steps] * 3
    finally:
        for each in busy:
            each.kill()
            each.wait()
    assert not list(tmp_path.glob("stall-*"))
    assert not (tmp_path / "ask").exists()
