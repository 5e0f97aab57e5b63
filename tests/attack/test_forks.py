"""Forks of all kinds in the middle of training; no bit of any rank may change.

Two ranks train twice, once undisturbed and once while children of every kind write into gradients,
drop them, end in every way, and live on while their parents train: forked by Python, by C, by
multiprocessing, before an exec, from other threads, out of a backward, as DataLoader workers, by
children themselves. Children by ``spawn`` and ``forkserver`` must inherit nothing. Every kind is
counted, on every rank.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from paceline import DistributedDataParallel
from paceline.errors import GroupClosedError
from paceline.testing import run_ranks
from tests.children import (
    FORKS,
    begin_in_fork,
    children_allowed,
    do_by_multiprocessing,
    do_in_fork,
    in_child,
    wait_for,
)

STEPS = 40
WIDTH = 120


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 3))


# --- what children do ----------------------------------------------------------------------------


def write(ddp: DistributedDataParallel) -> None:
    for parameter in ddp.parameters():
        if parameter.grad is not None:
            parameter.grad.fill_(float("nan"))


def scribble(ddp: DistributedDataParallel) -> None:
    """Write without torch, whose locks the thread may hold that was in a backward."""
    for parameter in ddp.parameters():
        if parameter.grad is not None:
            ctypes.memset(parameter.grad.data_ptr(), 0xFF, parameter.grad.nbytes)


def drop(ddp: DistributedDataParallel) -> None:
    write(ddp)
    ddp.zero_grad()
    ddp.__dict__.clear()
    gc.collect()


def use(ddp: DistributedDataParallel) -> None:
    write(ddp)
    with contextlib.suppress(GroupClosedError):
        ddp(torch.ones(2, WIDTH))
        raise AssertionError("the wrapper works in a child")


def fork_again(ddp: DistributedDataParallel) -> None:
    """A child of a child; what the child wrote is there, and stays."""
    write(ddp)
    in_child("os.fork", partial(drop, ddp))
    for parameter in ddp.parameters():
        if parameter.grad is not None:
            assert bool(parameter.grad.isnan().all())


DEEDS: dict[str, Callable[[DistributedDataParallel], None]] = {
    "write": write,
    "drop": drop,
    "use": use,
    "fork again": fork_again,
}


def inherit_nothing() -> None:
    """In a child that was not forked from a rank."""
    assert "/memfd:paceline" not in Path("/proc/self/maps").read_text()
    found = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    links = [os.readlink(path) for path in found if os.path.lexists(path)]
    assert not [link for link in links if "paceline" in link]


class Disturbing(Dataset[torch.Tensor]):
    """What a worker loads, it loads after it has disturbed the wrapper that it inherited."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        write(self._ddp)
        self._ddp.zero_grad()
        gc.collect()
        return torch.full((1,), float(index))


# --- the attack ----------------------------------------------------------------------------------


class Attack:
    """Forks beside and inside of the steps of a rank."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self._random = random.Random(dist.get_rank())
        self._lingering: list[int] = []
        self.counts: collections.Counter[str] = collections.Counter()

    def between_steps(self, number: int) -> None:
        """Gradients of the last step are there."""
        way, deed = self._random.choice([*FORKS]), self._random.choice([*DEEDS])
        if way == "fork from C" and deed == "use":
            deed = "drop"  # whether a lock is held in such a child is not known
        in_child(way, partial(DEEDS[deed], self._ddp))
        self.counts[way] += 1
        self.counts[deed] += 1
        if number % 15 == 5:
            self._linger()
        if number % 15 == 10:
            self._load()

    def on_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """In the middle of a backward."""
        if self._random.random() < 0.3:
            assert do_in_fork(partial(drop, self._ddp)) == 0
            self.counts["in a backward"] += 1
        return gradient

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Another thread forks while the steps inside are done."""
        is_over = threading.Event()

        def fork() -> None:
            while True:
                assert do_in_fork(partial(scribble, self._ddp)) == 0
                self.counts["beside"] += 1
                if is_over.wait(0.01):
                    return

        thread = threading.Thread(target=fork)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def end(self) -> None:
        for pid in self._lingering:
            os.kill(pid, signal.SIGKILL)
            assert wait_for(pid) == -signal.SIGKILL
        for method in ("spawn", "forkserver"):
            assert do_by_multiprocessing(inherit_nothing, method) == 0
            self.counts[method] += 1

    def _linger(self) -> None:
        """A child that writes into gradients for as long as its parent trains."""

        def stay() -> None:
            while True:
                write(self._ddp)
                time.sleep(0.01)

        self._lingering.append(begin_in_fork(stay))
        self.counts["lingering"] += 1

    def _load(self) -> None:
        with children_allowed():
            data = Disturbing(self._ddp)
            loader = DataLoader(data, num_workers=2, multiprocessing_context="fork")
            assert [int(batch) for batch in loader] == [0, 1, 2, 3]
        self.counts["DataLoader"] += 1


def train(transport: str, is_attacked: bool) -> tuple[list[bytes], dict[str, int]]:
    """The bits of all gradients and parameters, step by step, and what was done meanwhile."""
    ddp = DistributedDataParallel(make_model(), transport=transport, bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    attack = Attack(ddp)
    if is_attacked:
        next(iter(ddp.parameters())).register_hook(attack.on_gradient)
    seen = []
    for number in range(STEPS):
        torch.manual_seed(number * 2 + dist.get_rank())
        batch = torch.randn(4, WIDTH)
        beside: Any = attack.beside() if is_attacked and number % 4 == 0 else None
        with beside or contextlib.nullcontext():
            ddp(batch).square().mean().backward()
        if is_attacked:
            attack.between_steps(number)
        gradients = [p.grad for p in ddp.parameters() if p.grad is not None]
        tensors = [*gradients, *(p.detach() for p in ddp.parameters())]
        seen.append(b"".join(tensor.numpy().tobytes() for tensor in tensors))
        optimizer.step()
        if number % 3:
            optimizer.zero_grad()
    if is_attacked:
        attack.end()
    return seen, dict(attack.counts)


KINDS = (
    *FORKS,
    *DEEDS,
    "in a backward",
    "beside",
    "lingering",
    "DataLoader",
    "spawn",
    "forkserver",
)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_forks_of_all_kinds_change_no_bit(backend: str) -> None:
    quiet = run_ranks(2, train, "shm", False, backend=backend, timeout_s=180.0)
    attacked = run_ranks(2, train, "shm", True, backend=backend, timeout_s=180.0)
    for rank, ((expected, _), (found, counts)) in enumerate(zip(quiet, attacked, strict=True)):
        changed = [step for step in range(STEPS) if expected[step] != found[step]]
        assert not changed, f"rank {rank}: steps {changed} have other bits"
        missing = [kind for kind in KINDS if not counts.get(kind)]
        assert not missing, f"rank {rank}: nobody tried {missing}: {counts}"
