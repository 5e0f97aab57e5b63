"""20,000 steps: memory, descriptors, threads and Python's objects stay as they are.

Two ranks train a small model with BatchNorm, and a second one with a communication hook, some steps
under ``no_sync``; batches come from forked DataLoader workers that are made anew now and then.
Looks are taken while no worker lives. Plateaus are compared, not single looks: the heap goes up and
down.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import DistributedDataParallel
from paceline.hooks import fp16_compress_hook
from paceline.testing import run_ranks
from tests.children import children_allowed

STEPS = 20_000
LOADER_STEPS = 500
"""For so many steps a loader lives. After each there is a look."""
SIZE, ROWS = 8, 4
HEAP_KIB = 2048
"""By so much the heap goes up and down by itself. A leak of 230 bytes a step is above it."""
OBJECTS = 500
"""So many objects of Python may come and go. A leak of one in 18 steps is above it."""


@dataclass(frozen=True)
class Look:
    """What a process has at a moment."""

    rss_kib: int
    objects: int
    descriptors: int
    threads: int
    mappings: int


def look() -> Look:
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return Look(
        int(status.partition("VmRSS:")[2].split()[0]),
        len(gc.get_objects()),
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        Path("/proc/self/maps").read_text().count("/memfd:paceline"),
    )


def make_wrappers() -> tuple[DistributedDataParallel, DistributedDataParallel]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE), nn.Linear(SIZE, 2))
    hooked = DistributedDataParallel(nn.Linear(SIZE, 2))
    hooked.register_comm_hook(None, fp16_compress_hook)
    return DistributedDataParallel(plain), hooked


def batches(count: int) -> Iterator[torch.Tensor]:
    """From forked workers; they end with the loader."""
    torch.manual_seed(dist.get_rank())
    data = TensorDataset(torch.randn(ROWS * count, SIZE))
    with children_allowed():
        loader = DataLoader(data, 25 * ROWS, num_workers=1, multiprocessing_context="fork")
        for (many,) in loader:
            yield from many.split(ROWS)


def train(steps: int) -> tuple[list[Look], float]:
    plain, hooked = make_wrappers()
    optimizer = torch.optim.SGD([*plain.parameters(), *hooked.parameters()], lr=1e-3)
    looks = []
    for _ in range(steps // LOADER_STEPS):
        for number, batch in enumerate(batches(LOADER_STEPS)):
            is_local = number % 5 == 4
            with plain.no_sync() if is_local else nullcontext():
                plain(batch).square().mean().backward()
            if number % 4 == 0:
                hooked(batch).square().mean().backward()
            if not is_local:
                optimizer.step()
                optimizer.zero_grad()
        looks.append(look())
    return looks, float(sum(p.detach().double().sum() for p in plain.parameters()))


def fewest(looks: Sequence[Look]) -> tuple[int, int, int]:
    """The fewest of each kind: the last loader's thread, and its pipe, may still be there."""
    return (
        min(one.descriptors for one in looks),
        min(one.threads for one in looks),
        min(one.mappings for one in looks),
    )


@pytest.mark.timeout(600)
def test_nothing_grows_in_20000_steps() -> None:
    found = run_ranks(2, train, STEPS, timeout_s=580.0)
    assert found[0][1] == found[1][1]  # all ranks have the same parameters
    for looks, _ in found:
        assert len(looks) == STEPS // LOADER_STEPS
        warmed_up = looks[len(looks) // 10 :]
        half = len(warmed_up) // 2
        first, second = warmed_up[:half], warmed_up[half:]
        grown_kib = max(one.rss_kib for one in second) - max(one.rss_kib for one in first)
        assert grown_kib < HEAP_KIB, looks
        grown = max(one.objects for one in second) - max(one.objects for one in first)
        assert grown < OBJECTS, looks
        assert fewest(first) == fewest(second), looks
