"""Twelve faults, as a new user meets them: the right rank and phase is named on every survivor.

Each runs a training script (train.py) on three ranks, in which something goes wrong on rank 1 in
its sixth step. The other two say or raise who it was and what it did, within 5 s: after the budget
where they have to wait for a rank that lives, after the fault where they raise.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch.distributed as dist

from paceline.observe.stall.budget import Budget, WaitKind
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
        kind: What the others wait for.
    """

    name: str
    words: tuple[str, ...]
    stalls: bool = True
    kind: WaitKind = WaitKind.IN_STEP


LOADER = Fault("loader", ("waiting for the data loader", "train.py"), kind=WaitKind.BETWEEN_STEPS)
STALLS = [
    LOADER,
    Fault("forward", ("in forward of encoder.3", "train.py")),
    Fault("backward", ("in backward for", "in step 6", "train.py")),
    Fault("optimizer", ("in optimizer.step", "train.py")),
    Fault("SIGSTOP", ("is stopped", "in forward", "kill -CONT")),
    Fault("native sleep", ("in forward", "holds the GIL", "in fail_in_forward")),
    Fault("two locks", ("in forward of encoder.3", "deadlock", "lock second", "lock first")),
]
IN_FORWARD = "last seen in forward, in step 6"
DEATHS = [
    Fault("exception", ("rank 1", "bad batch", "in fail_in_forward", "in step 6"), stalls=False),
    Fault("early exit", ("rank 1", "last seen between two steps, in step 6"), stalls=False),
    Fault("os._exit", ("rank 1", IN_FORWARD), stalls=False),
    Fault("SIGKILL", ("rank 1", IN_FORWARD), stalls=False),
]
# What a rank of the same host knows besides.
HOW_IT_ENDED = {
    "early exit": "has ended without an exception",
    "exception": "after an exception: ValueError",
    "os._exit": "os._exit()",
    "SIGKILL": "killed by a signal",
}
BARRIER = ("torch.distributed.barrier", "train.py")
COLLECTIVE = Fault("collective", ("rank 1", *BARRIER), stalls=False)
OVER_GLOO = Fault("collective", ("waits in another collective than the others", *BARRIER))
FAULTS = [
    *STALLS,
    *(replace(each, words=(*each.words, HOW_IT_ENDED[each.name])) for each in DEATHS),
    COLLECTIVE,
]
QUICK = ("SIGKILL", "native sleep")
RAISED = re.compile(r"(PeerLostError|PeerFailedError|CollectiveMismatchError): ")


@dataclass
class Seen:
    """What each rank printed and raised, and what is in the run folder."""

    texts: dict[int, str] = field(default_factory=dict)
    report: str = ""
    told_s: dict[int, float] = field(default_factory=dict)
    """From the fault until a rank had said or raised who it is; of ranks that were watched."""


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
    """Run it as a user does; return when each rank spoke of it, as its log was seen to.

    A job that hangs for good is ended then.
    """
    command = [sys.executable, "-m", "paceline", "run", "-n", "3", "--run-dir", str(folder)]
    command += [*options, str(SCRIPT)]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")} | env
    spoke_s: dict[int, float] = {}
    with subprocess.Popen(
        command, env=clean, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as launcher:
        until_s = time.monotonic() + 170
        while launcher.poll() is None:
            assert time.monotonic() < until_s, launcher.kill()
            for rank in (0, 2):
                log = log_of(folder, rank)
                if rank not in spoke_s and (mark(rank) in log or RAISED.search(log)):
                    spoke_s[rank] = time.time()
            if len(spoke_s) == 2 and env["FAULT"] == "collective":
                launcher.terminate()
            time.sleep(0.05)
    return spoke_s


def mark(rank: int) -> str:
    return f"[paceline, rank {rank}] Stall 1: "


def log_of(folder: Path, rank: int) -> str:
    log = folder / f"rank{rank}.log"
    return log.read_text() if log.exists() else ""


def run_fault(fault: str, folder: Path) -> Seen:
    """On ranks that fork from this test's server."""
    env = {
        "FAULT": fault,
        "PACELINE_RUN_DIR": str(folder),
        "PACELINE_STALL_AFTER": str(STALL_AFTER_S),
    }
    raised = under_run_ranks(env, folder)
    return see(folder, raised, {})


def launch_fault(fault: str, folder: Path, *options: str, **env: str) -> Seen:
    """Under ``paceline run -n 3``."""
    return see(folder, {}, under_paceline_run({"FAULT": fault} | env, folder, *options))


def see(folder: Path, raised: dict[int, str], spoke_s: dict[int, float]) -> Seen:
    seen = Seen({rank: raised.get(rank, "") + log_of(folder, rank) for rank in range(3)})
    assert (folder / "fault").exists(), f"the fault has not happened: {seen.texts}"
    began_s = float((folder / "fault").read_text())
    seen.told_s = {rank: at_s - began_s for rank, at_s in spoke_s.items()}
    report = folder / "stall-1.txt"
    if report.exists():
        seen.report = report.read_text()
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
        assert "  rank 1: " in seen.report, "its stack, or why there is none"
        assert "train.py" in seen.report or fault.name == "SIGSTOP"
        assert "bucket" in seen.report, "what the others wait for"
        answers = (0, 2) if fault.name in ("SIGSTOP", "native sleep") else (0, 1, 2)
        for rank in answers:
            told = seen.report.split(f"last collectives of rank {rank}, newest first:", 1)[1]
            assert "reduction #" in told.split("\n\n", 1)[0]


def check_in_time(fault: Fault, seen: Seen, budget_s: float) -> None:
    after_s = budget_s if fault.stalls else 0.0
    late_s = [round(told_s - after_s, 1) for told_s in seen.told_s.values()]
    of = f"the budget of {budget_s} s" if fault.stalls else "the fault"
    print(f"\n{fault.name}: {late_s} s after {of}: {seen.report or seen.texts[0]}")
    check(fault, seen)
    assert len(late_s) == 2, "every survivor"
    assert all(late < REPORT_WITHIN_S for late in late_s), late_s


def named(faults: list[Fault]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("fault", faults, ids=lambda fault: fault.name)


@named([fault for fault in FAULTS if fault.name in QUICK])
def test_quick_ones_on_forked_ranks(fault: Fault, tmp_path: Path) -> None:
    check(fault, run_fault(fault.name, tmp_path))


@pytest.mark.alone
@pytest.mark.timeout(180)
@named(FAULTS)
def test_rank_and_phase_are_named_on_every_survivor(fault: Fault, tmp_path: Path) -> None:
    """In time, under ``paceline run -n 3 --stall-after 2``."""
    seen = launch_fault(fault.name, tmp_path, "--stall-after", str(STALL_AFTER_S))
    check_in_time(fault, seen, STALL_AFTER_S)


@pytest.mark.alone
@pytest.mark.timeout(180)
@named([*STALLS, *DEATHS, OVER_GLOO])
def test_they_are_named_over_gloo(fault: Fault, tmp_path: Path) -> None:
    options = "--transport", "c10d", "--stall-after", str(STALL_AFTER_S)
    check_in_time(fault, launch_fault(fault.name, tmp_path, *options), STALL_AFTER_S)


@pytest.mark.alone
@pytest.mark.timeout(180)
def test_a_loader_with_workers(tmp_path: Path) -> None:
    """Its process only waits for them."""
    options = "--stall-after", str(STALL_AFTER_S)
    seen = launch_fault(LOADER.name, tmp_path, *options, LOADER_WORKERS="2")
    check_in_time(LOADER, seen, STALL_AFTER_S)


@pytest.mark.alone
@pytest.mark.timeout(240)
@pytest.mark.skipif(not os.environ.get("PACELINE_LONG"), reason="PACELINE_LONG=1: 4 minutes")
@named(STALLS)
def test_with_the_budget_that_is_learned(fault: Fault, tmp_path: Path) -> None:
    """At the operating point of test_no_false_alarm_on_a_busy_machine."""
    budget_s = Budget().limit_s(fault.kind)
    seen = launch_fault(fault.name, tmp_path, LONG_S=str(budget_s + 10))
    check_in_time(fault, seen, budget_s)


@pytest.mark.alone
@pytest.mark.timeout(180)
def test_a_stall_that_ends_is_said_to_be_over(tmp_path: Path) -> None:
    seen = run_fault("forward", tmp_path)
    assert "Stall 1 is over" in seen.report
    assert sum("Stall 1 is over" in text for text in seen.texts.values()) == 1
    assert not (tmp_path / "stall-2.txt").exists()


@pytest.mark.alone
@pytest.mark.timeout(180)
def test_an_exception_of_rank_0_over_gloo(tmp_path: Path) -> None:
    """gloo says that a connection is closed; survivors name the rank and its exception."""
    launch_fault("exception", tmp_path / "run", "--transport", "c10d", CULPRIT="0")
    for rank in (1, 2):
        text = log_of(tmp_path / "run", rank)
        assert "PeerLostError: all_reduce of bucket" in text
        assert "because rank 0 (pid " in text
        assert "has ended with ValueError: a bad batch (" in text
