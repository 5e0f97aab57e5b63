"""What every transport must do. A new one is added to TRANSPORTS and runs all of this."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.config import TransportChoice
from paceline.testing import run_ranks
from paceline.transport import C10dTransport
from paceline.transport.choose import choose_transport
from paceline.types import Transport


def in_shared_memory(group: Any) -> Transport:
    return choose_transport(group, TransportChoice.SHM, torch.device("cpu"), 8 << 20)


TRANSPORTS: dict[str, Callable[[Any], Transport]] = {
    "c10d": C10dTransport,
    "shm": in_shared_memory,
}
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)

pytestmark = pytest.mark.parametrize("kind", list(TRANSPORTS))


def make(kind: str) -> Transport:
    return TRANSPORTS[kind](dist.group.WORLD)


def sums_in_place(kind: str) -> list[bool]:
    transport = make(kind)
    found = []
    for dtype in DTYPES:
        flat = transport.allocate(1000, dtype, torch.device("cpu"))
        assert flat.shape == (1000,)
        assert not flat.any()
        address = flat.data_ptr()
        flat.fill_(transport.rank + 1)
        transport.start(flat).wait()
        total = sum(range(1, transport.world + 1))
        found.append(flat.data_ptr() == address and bool((flat == total).all()))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_sums_every_dtype_in_place(kind: str, ranks: int) -> None:
    assert run_ranks(ranks, partial(sums_in_place, kind)) == [[True] * len(DTYPES)] * ranks


def many_in_flight(kind: str) -> tuple[bool, bool, int]:
    transport = make(kind)
    device = torch.device("cpu")
    flats = [transport.allocate(size, torch.float32, device) for size in (1, 7, 65536, 300_001)]
    for number, flat in enumerate(flats):
        flat.fill_(float(number + transport.rank))
    stamps: list[int] = []
    began = time.perf_counter_ns()
    reductions = [transport.start(flat) for flat in flats]
    for reduction in reductions:
        reduction.on_done(stamps.append)
    for reduction in reversed(reductions):
        reduction.wait()
    right = all(
        bool((flat == transport.world * n + sum(range(transport.world))).all())
        for n, flat in enumerate(flats)
    )
    dist.barrier()
    assert all(began < stamp < time.perf_counter_ns() for stamp in stamps)
    return right, all(r.is_done() for r in reductions), len(stamps)


def test_many_in_flight_are_told_apart(kind: str) -> None:
    assert run_ranks(2, partial(many_in_flight, kind)) == [(True, True, 4)] * 2


def last_sums(kind: str, *, behind_another: bool) -> list[bool]:
    transport = make(kind)
    device = torch.device("cpu")
    found = []
    for dtype, numel in [*((dtype, 1000) for dtype in DTYPES), (torch.float32, 1 << 20)]:
        first = transport.allocate(1 << 20, torch.float32, device).fill_(1.0)
        last = transport.allocate(numel, dtype, device).fill_(transport.rank + 1)
        before = transport.start(first) if behind_another else None
        stamps: list[int] = []
        reduction = transport.start_last(last)
        reduction.on_done(stamps.append)
        reduction.wait()
        reduction.wait()
        assert reduction.is_done()
        if before is not None:
            before.wait()
            found.append(bool((first == transport.world).all()))
        total = sum(range(1, transport.world + 1))
        dist.barrier()  # a backend tells on a thread of its own
        found.append(bool((last == total).all()) and len(stamps) == 1)
    return found


@pytest.mark.parametrize("behind_another", [False, True])
def test_the_last_sum_is_there_after_the_wait(kind: str, behind_another: bool) -> None:
    for found in run_ranks(2, partial(last_sums, kind, behind_another=behind_another)):
        assert found == [True] * len(found)


def sparse_rows(kind: str) -> torch.Tensor:
    transport = make(kind)
    rows = [[0, 2]] if transport.rank == 0 else [[2, 4]]
    gradient = torch.sparse_coo_tensor(rows, torch.ones(2, 3), (6, 3), check_invariants=True)
    gradient = gradient.coalesce()
    transport.start_sparse(gradient).wait()
    return gradient.to_dense()[:, 0]


def test_sums_sparse_gradients(kind: str) -> None:
    for found in run_ranks(2, partial(sparse_rows, kind)):
        assert found.tolist() == [1.0, 0.0, 2.0, 0.0, 1.0, 0.0]


def facts(kind: str) -> tuple[int, int, str]:
    transport = make(kind)
    return transport.rank, transport.world, transport.name


def test_says_who_and_what_it_is(kind: str) -> None:
    for rank, found in enumerate(run_ranks(2, partial(facts, kind))):
        assert found[:2] == (rank, 2)
        assert kind in found[2]
