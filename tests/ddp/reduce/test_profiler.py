"""Reductions in shared memory are there for torch's profilers to see, with their sizes."""

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


def sizes(transport: str, bucket_cap_mb: float) -> tuple[list[int], list[int]]:
    """Return how large the reductions are that a profiler sees, and how large they have to be."""
    layers = nn.Sequential(*[nn.Linear(100, 100) for _ in range(4)])
    ddp = DDP(layers, transport=transport, bucket_cap_mb=bucket_cap_mb)
    for _ in range(2):
        ddp(torch.ones(2, 100)).sum().backward()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profile:
        ddp(torch.ones(2, 100)).sum().backward()
    name = "c10d::allreduce_" if transport == "shm" else "gloo:all_reduce"
    seen = [event.input_shapes for event in profile.events() if event.name == name]
    return [shape[0] for (shape,) in seen], [bucket.spec.numel for bucket in ddp.reducer.buckets]


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("bucket_cap_mb", [0.03, 25])
def test_every_reduction_has_its_size(transport: str, bucket_cap_mb: float) -> None:
    for seen, expected in run_ranks(2, sizes, transport, bucket_cap_mb):
        assert seen[:-1] == expected[:-1]
        assert 0 <= seen[-1] - expected[-1] < 100  # the control block travels with the last one
        assert len(seen) == (4 if bucket_cap_mb < 1 else 1)
