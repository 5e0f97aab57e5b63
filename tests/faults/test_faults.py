"""Twelve faults, as a new user meets them: the right rank and phase is named on every survivor.

Each runs a training script (train.py) on three ranks, in which something goes wrong on rank 1 in
its sixth step. What the other two ranks print and raise is what a user sees.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch.distributed as dist

from paceline.testing import run_ranks
from paceline.testing.failures import RanksFailedError

SCRIPT = Path(__file__).with_name("train.py")
STALL_AFTER_S = 2.0
REPORT_WITHIN_S = 5.0


@dataclass(frozen=True)
class Fault:
    """What must be said about it.

    Attributes:
        name: In train.py.
        words: In the sentence of the stall report, or in the error, of every survivor.
        stalls: There is a stall report; else survivors raise.
    """

    name: str
    words: tuple[str, ...]
    stalls: bool = True


FAULTS = [
    Fault("loader", ("waiting for the data loader", "train.py")),
    Fault("forward", ("in forward of encoder.3", "train.py")),
    Fault("backward", ("in backward for", "in step 6", "train.py")),
    Fault("optimizer", ("in optimizer.step", "train.py")),
    Fault("SIGSTOP", ("is stopped", "in forward", "kill -CONT")),
    Fault("native sleep", ("in forward", "holds the GIL", "in fail_in_forward")),
    Fault("two locks", ("in forward of encoder.3", "deadlock", "lock second", "lock first")),
    Fault("exception", ("rank 1", "ValueError: a bad batch", "in fail_in_forward"), stalls=False),
    Fault("early exit", ("rank 1", "has ended without an exception"), stalls=False),
    Fault("os._exit", ("rank 1", "os._exit()", "last seen in forward, in step 6"), stalls=False),
    Fault("SIGKILL", ("rank 1", "killed by a signal", "last seen in forward"), stalls=False),
    Fault("collective", ("rank 1", "torch.distributed.barrier", "train.py"), stalls=False),
]
QUICK = ("SIGKILL", "native sleep")


@dataclass
class Seen:
    """What each rank printed and raised, and what is in the run folder."""

    texts: dict[int, str] = field(default_factory=dict)
    report: str = ""
    told_s: dict[int, float] = field(default_factory=dict)
    """From the fault until a rank had said who it is; of ranks that were watched."""


def on_rank(folder: str) -> None:
    """In a rank: run the script, with its own file for stderr, as a launcher does."""
    log = Path(folder, f"rank{dist.get_rank()}.log")
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    runpy.run_path(str(SCRIPT), run_name="__main__")


def under_run_ranks(env: dict[str, str], folder: Path) -> dict[int, str]:
    """Run the script on ranks that fork from this test's server; return what each raised."""
    try:
        run_ranks(3, on_rank, str(folder), env=env, timeout_s=120, grace_s=30)
    except RanksFailedError as error:
        return {each.rank: f"{each.summary}\n{each.detail}" for each in error.failures}
    return {}


def under_paceline_run(env: dict[str, str], folder: Path, *options: str) -> dict[int, float]:
    """Run it as a user does; return when each rank spoke of a stall, as its log was seen to."""
    command = [sys.executable, "-m", "paceline", "run", "-n", "3", "--run-dir", str(folder)]
    command += ["--stall-after", str(STALL_AFTER_S), *options, str(SCRIPT)]
    for name in ("PACELINE_STALL_AFTER", "PACELINE_RUN_DIR"):
        env.pop(name, None)
    spoke_s: dict[int, float] = {}
    with subprocess.Popen(
        command, env=os.environ | env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as launcher:
        until_s = time.monotonic() + 150
        while launcher.poll() is None:
            assert time.monotonic() < until_s, launcher.kill()
            for rank in (0, 2):
                if rank not in spoke_s and mark(rank) in log_of(folder, rank):
                    spoke_s[rank] = time.time()
            time.sleep(0.05)
    return spoke_s


def mark(rank: int) -> str:
    return f"[paceline, rank {rank}] Stall 1: "


def log_of(folder: Path, rank: int) -> str:
    log = folder / f"rank{rank}.log"
    return log.read_text() if log.exists() else ""


def run_fault(fault: str, folder: Path, *, forked: bool) -> Seen:
    env = {
        "FAULT": fault,
        "PACELINE_RUN_DIR": str(folder),
        "PACELINE_STALL_AFTER": str(STALL_AFTER_S),
    }
    raised = under_run_ranks(env, folder) if forked else {}
    spoke_s = {} if forked else under_paceline_run(env, folder)
    seen = Seen({rank: raised.get(rank, "") + log_of(folder, rank) for rank in range(3)})
    assert (folder / "fault").exists(), f"the fault has not happened: {seen.texts}"
    report = folder / "stall-1.txt"
    if report.exists():
        seen.report = report.read_text()
        began_s = float((folder / "fault").read_text())
        seen.told_s = {rank: at_s - began_s for rank, at_s in spoke_s.items()}
    return seen


def sentence(text: str, rank: int) -> str:
    """What the watchdog of a rank said first about the first stall."""
    assert mark(rank) in text, f"rank {rank} has said nothing:\n{text}"
    return text.split(mark(rank), 1)[1].split("\n", 1)[0]


def check(fault: Fault, seen: Seen) -> None:
    for rank in (0, 2):
        text = seen.texts[rank]
        if fault.stalls:
            text = sentence(text, rank)
            assert text.startswith("Rank 1 (pid "), text
        missing = [words for words in fault.words if words not in text]
        assert not missing, f"rank {rank} does not say {missing}:\n{text}"
        if fault.stalls:
            assert seen.texts[rank].count("] Stall 1: ") == 1, "once for one stall"
    if fault.stalls:
        assert "train.py" in seen.report or fault.name == "SIGSTOP"
        assert "bucket" in seen.report, "what the others wait for"
        assert "all_reduce #" in seen.report


@pytest.mark.parametrize("fault", [f for f in FAULTS if f.name in QUICK], ids=lambda f: f.name)
def test_quick_ones_on_forked_ranks(fault: Fault, tmp_path: Path) -> None:
    check(fault, run_fault(fault.name, tmp_path, forked=True))


@pytest.mark.alone
@pytest.mark.timeout(180)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_rank_and_phase_are_named_on_every_survivor(fault: Fault, tmp_path: Path) -> None:
    """Under ``paceline run -n 3``, in time."""
    seen = run_fault(fault.name, tmp_path, forked=False)
    late_s = [round(told_s - STALL_AFTER_S, 1) for told_s in seen.told_s.values()]
    print(f"\n{fault.name}: {late_s} s after the budget: {seen.report or seen.texts[0]}")
    check(fault, seen)
    assert len(late_s) == (2 if fault.stalls else 0)
    assert all(late < REPORT_WITHIN_S for late in late_s)


@pytest.mark.alone
@pytest.mark.timeout(180)
def test_a_stall_that_ends_is_said_to_be_over(tmp_path: Path) -> None:
    seen = run_fault("forward", tmp_path, forked=True)
    assert "Stall 1 is over" in seen.report
    assert sum("Stall 1 is over" in text for text in seen.texts.values()) == 1
    assert not (tmp_path / "stall-2.txt").exists()


@pytest.mark.alone
@pytest.mark.timeout(180)
def test_an_exception_of_rank_0_over_gloo(tmp_path: Path) -> None:
    """gloo says that a connection is closed; survivors name the rank and its exception."""
    env = {"FAULT": "exception", "CULPRIT": "0"}
    under_paceline_run(env, tmp_path / "run", "--transport", "c10d")
    for rank in (1, 2):
        text = log_of(tmp_path / "run", rank)
        assert "PeerLostError: all_reduce of bucket" in text
        assert "because rank 0 (pid " in text
        assert "has ended with ValueError: a bad batch (" in text
