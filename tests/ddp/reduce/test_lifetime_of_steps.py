"""Steps leave nothing behind: no memory, no graph, also if they fail."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from paceline import DistributedDataParallel as DDP
from paceline.errors import StepError
from paceline.testing import run_ranks
from tests.ddp.reduce.lifetime_cases import VARIANTS, MarkedNet, build, no_collector, step


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class TestSteadyState:
    def test_no_object_is_left_by_a_step(self) -> None:
        """With the collector off, every cycle would show."""

        def growth(options: dict[str, Any], steps: int = 50) -> int:
            ddp = DDP(build(), **options)
            for _ in range(5):
                step(ddp)
            before = len(gc.get_objects())
            for _ in range(steps):
                step(ddp)
            return len(gc.get_objects()) - before

        def run() -> dict[str, int]:
            with no_collector():
                growth({})
                return {str(options): growth(options) for options in VARIANTS}

        for found in run_ranks(2, run):
            assert all(objects < 50 for objects in found.values()), found

    def test_memory_does_not_grow(self) -> None:
        """A gradient that is leaked in every step would make it grow twenty times as much."""
        gradient_bytes = 512 * 512 * 4

        def run() -> int:
            ddp = DDP(nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512)))
            x = torch.ones(1, 512)
            before = 0
            for number in range(220):
                if number == 20:
                    before = resident_bytes()
                ddp.zero_grad()
                ddp(x).sum().backward()
            return resident_bytes() - before

        for grown in run_ranks(2, run):
            assert grown < 10 * gradient_bytes

    def test_no_thread_is_left(self) -> None:
        def tasks(expected: int = 0) -> int:
            """A thread that was joined is in the kernel's list for a moment longer."""
            until_s = time.monotonic() + 60
            while True:
                found = len(os.listdir("/proc/self/task"))
                if found <= expected or not expected or time.monotonic() > until_s:
                    return found
                time.sleep(0.01)

        def life() -> None:
            ddp = DDP(build())
            for _ in range(3):
                step(ddp)

        def run() -> tuple[int, int, int]:
            life()  # what torch and gloo start, they start once
            before = tasks()
            life()
            return before, tasks(before), threading.active_count()

        for before, after, python_threads in run_ranks(2, run):
            assert after <= before
            assert python_threads == 1


class TestGraph:
    """The graph of a step is freed when its user lets go of it."""

    def test_after_backward(self) -> None:
        def alive_after_steps(options: dict[str, Any]) -> list[int]:
            ddp = DDP(MarkedNet(), **options)
            alive = []
            for _ in range(3):
                loss = ddp(torch.ones(1, 4)).sum()
                assert ddp.module.alive() == 1
                loss.backward()
                del loss
                alive.append(ddp.module.alive())
            return alive

        def run() -> dict[str, list[int]]:
            with no_collector():
                return {str(options): alive_after_steps(options) for options in VARIANTS}

        for found in run_ranks(2, run):
            assert found == {options: [0, 0, 0] for options in found}

    def test_without_backward(self) -> None:
        def run() -> int:
            with no_collector():
                ddp = DDP(MarkedNet())
                for _ in range(3):
                    ddp(torch.ones(1, 4))
                return ddp.module.alive()

        assert run_ranks(1, run) == [0]

    def test_with_a_communication_hook(self) -> None:
        def run() -> int:
            with no_collector():
                ddp = DDP(MarkedNet())
                ddp.register_comm_hook(None, allreduce_hook)
                for _ in range(3):
                    ddp(torch.ones(1, 4)).sum().backward()
                return ddp.module.alive()

        assert run_ranks(2, run) == [0, 0]

    def test_after_an_error_of_the_step(self) -> None:
        def run() -> tuple[int, int]:
            with no_collector():
                ddp = DDP(MarkedNet())
                failures = 0
                for _ in range(3):
                    ddp.zero_grad()
                    try:
                        ddp(torch.ones(1, 4), spare=False).sum().backward()
                    except StepError:
                        failures += 1
                return failures, ddp.module.alive()

        assert run_ranks(2, run) == [(3, 0), (3, 0)]

    def test_after_an_exception_in_backward(self) -> None:
        """The step is completed by the next forward; until then only its buckets are kept."""

        def run() -> tuple[int, int]:
            with no_collector():
                ddp = DDP(MarkedNet())
                handle = ddp.module.first.weight.register_hook(lambda _: 1 / 0)
                failures = 0
                for _ in range(3):
                    try:
                        ddp(torch.ones(1, 4)).sum().backward()
                    except ZeroDivisionError:
                        failures += 1
                assert ddp.module.alive() == 0
                handle.remove()
                ddp.zero_grad()
                ddp(torch.ones(1, 4)).sum().backward()
                return failures, ddp.module.alive()

        assert run_ranks(2, run) == [(3, 0), (3, 0)]


class TestFailedSteps:
    def test_leave_no_object_behind(self) -> None:
        def fail(ddp: DDP) -> None:
            ddp.zero_grad()
            with contextlib.suppress(StepError):
                ddp(torch.ones(1, 4), spare=False).sum().backward()

        def run() -> int:
            with no_collector():
                ddp = DDP(MarkedNet())
                for _ in range(5):
                    fail(ddp)
                ddp.module.markers.clear()
                before = len(gc.get_objects())
                for _ in range(30):
                    fail(ddp)
                ddp.module.markers.clear()
                return len(gc.get_objects()) - before

        for objects in run_ranks(2, run):
            assert objects < 30
