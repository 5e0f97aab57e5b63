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
        ddp._transport.resolve()._futures.close()  # the events end on that thread
    found: Any = profile.events() if kind == "kineto" else profile.function_events
    events = [event for event in found if event.name == "shm:all_reduce"]
    return [(event.is_async, event.cpu_time_total > 0) for event in events]


@pytest.mark.parametrize("kind", PROFILERS)
def test_every_reduction_is_an_event(kind: str) -> None:
    for events in run_ranks(2, run, kind):
        assert events == [(True, True)] * STEPS
