"""Thousands of steps leave no thread, no memory and no cycle; nothing outlives its forward."""

from __future__ import annotations

import gc
import resource
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from paceline.dp import replica_threads
from paceline.dp.replica_threads import POOL
from tests.dp.compare import CPUS


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize("steps", [200, pytest.param(4_000, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)  # 10,000 took 40 s at a load of 5, 180 s at 8: hand-overs wait
def test_many_forwards_and_backwards(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_threads, "IDLE_S", 60.0)  # they are counted while they wait
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    parallel = paceline.DataParallel(model, CPUS)
    x = torch.randn(4, 8)

    def train(steps: int) -> None:
        for _ in range(steps):
            parallel(x).sum().backward()
            model.zero_grad()

    threads = threading.active_count()
    train(min(500, steps))  # allocators and caches fill
    gc.collect()
    gc.disable()  # what only the collector would free is growth here
    try:
        before = resident_bytes()
        train(steps)
        grown = resident_bytes() - before
    finally:
        gc.enable()
    assert threading.active_count() == threads + 2
    assert gc.collect() == 0
    # A leak of one small tensor (above 300 bytes) each step would be 3 MB in 10,000 steps.
    assert grown < 2 * 2**20
    POOL.end_all()
    assert threading.active_count() == threads


def test_inputs_outputs_and_replicas_do_not_live_until_the_next_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        replica_threads, "IDLE_S", 60.0
    )  # the end of a thread would free them as well
    alive: list[weakref.ref[object]] = []

    class Remembers(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            alive.append(weakref.ref(self))
            alive.append(weakref.ref(x))
            out = x * 2
            alive.append(weakref.ref(out))
            return out

    gc.collect()
    gc.disable()
    try:
        result = paceline.DataParallel(Remembers(), CPUS)(torch.zeros(4))
        assert result.tolist() == [0] * 4
        until = threading.Event()
        for _ in range(6000):  # a thread may still be on its way back to waiting
            if not any(ref() for ref in alive):
                break
            until.wait(0.01)
        assert len(alive) == 6
        assert not any(ref() for ref in alive)
    finally:
        gc.enable()


def test_the_wrapper_dies_with_its_last_reference() -> None:
    gc.collect()
    parallel = paceline.DataParallel(nn.Linear(2, 2), CPUS)
    parallel(torch.zeros(4, 2)).sum().backward()
    ref = weakref.ref(parallel.module)
    gc.disable()
    try:
        del parallel
        assert ref() is None
    finally:
        gc.enable()
