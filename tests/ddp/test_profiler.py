"""Reductions in shared memory are there for torch's profilers to see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline import DistributedDataParallel as DDP
from paceline.testing import run_ranks

STEPS = 4
PROFILERS = {
    "autograd": lambda: torch.autograd.profiler.profile(),
    "kineto": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
}


def run(kind: str) -> list[tuple[bool, bool]]:
    ddp = DDP(nn.Linear(100, 100), transport="shm")
    with PROFILERS[kind]() as profile:
        for _ in range(STEPS):
            ddp(torch.ones(2, 100)).sum().backward()
    found: Any = profile.events() if kind == "kineto" else profile.function_events
    events = [event for event in found if event.name == "shm:all_reduce"]
    return [(event.is_async, event.cpu_time_total > 0) for event in events]


@pytest.mark.parametrize("kind", PROFILERS)
def test_every_reduction_is_an_event(kind: str) -> None:
    for events in run_ranks(2, run, kind):
        assert events == [(True, True)] * STEPS


def start_and_stop(times: int) -> int:
    """A profiler that stops right after a backward must not meet an event in its middle."""
    ddp = DDP(nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]), bucket_cap_mb=0.01)
    events = 0
    for _ in range(times):
        with PROFILERS["kineto"]() as profile:
            ddp(torch.ones(2, 64)).sum().backward()
        events += sum(event.name == "shm:all_reduce" for event in profile.events())
    return events


def test_a_profiler_may_stop_at_once() -> None:
    first, second = run_ranks(2, start_and_stop, 30)
    assert first == second > 200
