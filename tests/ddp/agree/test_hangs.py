"""Ranks that would wait for each other for ever are told so; those that are only slow are not."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline import DistributedDataParallel as DDP
from paceline.errors import CollectiveError
from paceline.liveness import wait_log
from paceline.native.extension import missing_reason
from paceline.shm.diagnose.deadlock import Evidence, find_deadlock
from paceline.shm.diagnose.thread_location import EVERYBODY, ThreadLocation
from paceline.testing import run_ranks

pytestmark = [
    pytest.mark.skipif(missing_reason() is not None, reason=str(missing_reason())),
    pytest.mark.timeout(120),
]


class Notes(logging.Handler):
    """What the log of this rank says; tells all ranks when it says something."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("paceline").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")
        store().set(f"log of rank {dist.get_rank()}", "")


def store() -> Any:
    return dist.distributed_c10d._get_default_store()


def step(ddp: DDP) -> None:
    ddp(torch.ones(2, 4)).sum().backward()


def trained(steps: int = 3) -> DDP:
    ddp = DDP(nn.Linear(4, 4))
    for _ in range(steps):
        step(ddp)
    return ddp


def caught(action: Callable[[], Any]) -> tuple[str, int | None, str]:
    try:
        action()
    except CollectiveError as error:
        return type(error).__name__, error.rank, str(error)
    return "nothing", None, ""


class TestDifferentCollectives:
    @pytest.mark.parametrize("alone", [0, pytest.param(1, marks=pytest.mark.slow)])
    def test_on_gloo(self, alone: int) -> None:
        """One rank's loader is shorter: it is in a metric's all_reduce, in gloo's C++."""

        def run() -> Any:
            notes, ddp = Notes(), trained()
            found = caught(lambda: step(ddp)) if dist.get_rank() != alone else None
            dist.all_reduce(torch.ones(1))  # the others come in the end: nobody stays in gloo
            return found, notes.lines

        results = run_ranks(3, run)
        for rank, (found, _) in enumerate(results):
            if rank != alone:
                self.check(found, rank, alone)
        (line,) = results[alone][1]
        assert line.startswith(f"ERROR Rank {alone}: ranks are in different collectives")
        assert "test_hangs.py:" in line

    @pytest.mark.parametrize("alone", [0, pytest.param(1, marks=pytest.mark.slow)])
    def test_on_our_backend(self, alone: int) -> None:
        """Both groups are ours: all ranks raise."""

        def run() -> Any:
            ddp = trained()
            if dist.get_rank() == alone:
                return caught(lambda: dist.all_reduce(torch.ones(1)))
            return caught(lambda: step(ddp))

        for rank, found in enumerate(run_ranks(3, run, backend="paceline")):
            self.check(found, rank, alone)

    def test_in_two_wrappers(self) -> None:
        """Ranks run the backwards of two models in different orders."""

        def run() -> Any:
            ddps = [trained(), trained()]
            mine = ddps[dist.get_rank()]
            return caught(lambda: step(mine))

        for rank, (kind, about, text) in enumerate(run_ranks(2, run)):
            assert kind == "CollectiveMismatchError"
            assert about in (0, 1)
            assert f"Rank {rank}: all_reduce #4" in text
            assert text.count("a reduction of gradients, called at") == 2

    @staticmethod
    def check(found: tuple[str, int, str], rank: int, alone: int) -> None:
        kind, about, text = found
        assert kind == "CollectiveMismatchError"
        assert about in range(3)
        assert f"Rank {rank}: all_reduce #" in text
        assert f"\n  rank {alone} waits in " in text
        assert "in torch.distributed.all_reduce of group '0', called at" in text
        assert "in a reduction of gradients, called at" in text
        assert text.count("test_hangs.py:") == 2
        assert "with ddp.join():" in text


@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_a_rank_that_destroys_its_group_and_lives_on_is_named(backend: str) -> None:
    def run() -> Any:
        ddp = trained()
        words = store()
        if dist.get_rank() == 1:
            dist.destroy_process_group()
            words.wait(["told 0", "told 2"])
            return None
        found = caught(lambda: step(ddp))
        words.set(f"told {dist.get_rank()}", "")
        return found

    for found in run_ranks(3, run, backend=backend)[::2]:
        kind, rank, text = found
        assert (kind, rank) == ("PeerLostError", 1)
        assert "has left the group: destroy_process_group()" in text


class TestOnlySlow:
    """Nothing is raised; whoever waits long says so on its log."""

    @staticmethod
    def impatient() -> Notes:
        wait_log.LOG_AFTER_S = 1.5
        return Notes()

    def test_a_rank_in_code_of_its_own(self) -> None:
        def run() -> list[str]:
            notes, ddp = self.impatient(), trained()
            if dist.get_rank() == 1:
                store().wait(["log of rank 0", "log of rank 2"])
            step(ddp)
            dist.barrier()
            return notes.lines

        results = run_ranks(3, run)
        assert results[1] == []
        for rank in (0, 2):
            line = results[rank][0]
            assert line.startswith(f"WARNING Rank {rank} has waited for ")
            assert "in all_reduce #4 of" in line
            assert "rank 1 (pid" in line
            assert "in no collective, at" in line
            assert "test_hangs.py:" in line
            assert "in run" in line

    def test_an_evaluation_on_one_rank_while_others_are_in_a_barrier(self) -> None:
        def run() -> list[str]:
            notes, ddp = self.impatient(), trained()
            if dist.get_rank() == 0:
                store().wait(["log of rank 1"])
                ddp.module(torch.ones(2, 4))
            dist.barrier()
            step(ddp)
            return notes.lines

        results = run_ranks(2, run, backend="paceline")
        assert results[0] == []
        assert all(line.startswith("WARNING Rank 1 has waited for") for line in results[1])
        assert "in barrier #" in results[1][0]

    @pytest.mark.parametrize("backend", ["gloo", pytest.param("paceline", marks=pytest.mark.slow)])
    def test_a_collective_of_other_ranks_that_will_end(self, backend: str) -> None:
        """Rank 1 is in an all_reduce with rank 2, which comes when rank 0 has complained."""

        def run() -> list[str]:
            notes, ddp = self.impatient(), trained()
            pair = dist.new_group([1, 2])
            if dist.get_rank() == 2:
                store().wait(["log of rank 0"])
            if dist.get_rank() != 0:
                dist.all_reduce(torch.ones(1), group=pair)
            step(ddp)
            dist.barrier()
            return notes.lines

        lines = run_ranks(3, run, backend=backend)[0]
        assert all(line.startswith("WARNING Rank 0 has waited for") for line in lines)
        assert "in torch.distributed.all_reduce of group" in lines[0]


def test_the_watch_ends_with_its_wrapper() -> None:
    def run() -> list[int]:
        def watching() -> int:
            return sum(thread.name == "paceline-watch" for thread in threading.enumerate())

        ddp = trained()
        counts = [watching()]
        dist.barrier()
        del ddp
        gc.collect()
        return [*counts, watching()]

    assert run_ranks(2, run) == [[1, 0]] * 2


class TestDecision:
    """Every condition is needed; see [Note: no false alarm]."""

    ours = ThreadLocation("a reduction", "a.py:1", True, "1/2", link="us/0")
    theirs = ThreadLocation("all_reduce", "b.py:1", True, "3/4", group="0", needs=EVERYBODY)

    def decide(self, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
        here = changes.pop("started_here", 5)
        monkeypatch.setattr("paceline.shm.diagnose.deadlock.group_named", lambda name: self)
        monkeypatch.setattr("paceline.shm.diagnose.deadlock.default_group_or_none", lambda: self)
        monkeypatch.setattr(
            "paceline.shm.diagnose.deadlock.collectives_started", lambda group: here
        )
        ours = ThreadLocation(**{**vars(self.ours), **changes.pop("ours", {})})
        theirs = ThreadLocation(**{**vars(self.theirs), "started": 6, **changes})
        awaits = theirs.link == "waits"
        return find_deadlock("us/0", {1: Evidence(theirs, ours)}, lambda link, peer: awaits)

    def rank(self) -> int:
        return 0

    def test_a_deadlock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.decide(monkeypatch) == (1, "")
        assert self.decide(monkeypatch, needs="0") == (1, "")
        assert self.decide(monkeypatch, link="waits") == (1, "waits")

    @pytest.mark.parametrize(
        "changes",
        [
            {"is_waiting": False},
            {"started_here": 6},
            {"needs": ""},
            {"needs": "2"},
            {"link": "other"},
            {"ours": {"is_waiting": False}},
            {"ours": {"link": "us/1"}},
        ],
        ids=str,
    )
    def test_no_deadlock(self, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
        assert self.decide(monkeypatch, **changes) is None

    def test_a_rank_whose_thread_has_ended_is_no_deadlock(self) -> None:
        evidence = {1: Evidence(None, self.ours)}
        assert find_deadlock("us/0", evidence, lambda link, peer: True) is None

    def test_one_rank_that_moves_is_enough(self, monkeypatch: pytest.MonkeyPatch) -> None:
        moving = ThreadLocation(place="c.py:1")
        evidence = {1: Evidence(self.theirs, self.ours), 2: Evidence(moving, self.ours)}
        assert find_deadlock("us/0", evidence, lambda link, peer: True) is None
