"""Errors of the backend have gloo's phrase for the same mistake: both are raised, side by side."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.native import extension
from paceline.testing import RanksFailedError, run_ranks
from tests.test_phrases import Raised, check, error_of

pytestmark = pytest.mark.skipif(
    extension.native is None, reason="needs the native core: a C compiler"
)

TWO, THREE = torch.ones(2), torch.ones(3)
SOON = timedelta(seconds=0.2)


def rooted(kind: type, root: int) -> Any:
    options = kind()
    options.rootRank = root
    return options


# name: (gloo's phrase, the mistake)
MISTAKES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "all_gather, number": (
        "invalid output tensor list at index 0 (expected length 2, got 1)",
        lambda group: dist.all_gather([TWO], TWO, group=group),
    ),
    "all_gather, size": (
        "invalid tensor size at index 1 (expected (2), got (3))",
        lambda group: dist.all_gather([TWO, THREE], TWO, group=group),
    ),
    "all_gather, dtype": (
        "invalid tensor type at index 1",
        lambda group: group.allgather([[TWO, TWO.double()]], [TWO]).wait(),
    ),
    "reduce_scatter, number": (
        "invalid input tensor list size, must be world size",
        lambda group: dist.reduce_scatter(TWO, [TWO], group=group),
    ),
    "gather, number": (
        "Incorrect output list size 1. Output list size should be 2, same as size of the",
        lambda group: dist.gather(TWO, [TWO], dst=0, group=group),
    ),
    "gather, size": (
        "invalid tensor size at index 1 (expected (2), got (3))",
        lambda group: dist.gather(TWO, [TWO, THREE], dst=0, group=group),
    ),
    "scatter, number": (
        "Incorrect input list size 1. Input list size should be 2, same as size of the",
        lambda group: dist.scatter(TWO, [TWO], src=0, group=group),
    ),
    "scatter, size": (
        "invalid tensor size at index 1 (expected (2), got (3))",
        lambda group: dist.scatter(TWO, [TWO, THREE], src=0, group=group),
    ),
    "all_to_all, input": (
        "input tensor list size 1 does not match world size 2",
        lambda group: group.alltoall([TWO, TWO], [TWO], dist.AllToAllOptions()).wait(),
    ),
    "all_to_all, output": (
        "output tensor list size 1 does not match world size 2",
        lambda group: group.alltoall([TWO], [TWO, TWO], dist.AllToAllOptions()).wait(),
    ),
    "splits, number": (
        "Number of tensor splits not equal to group size",
        lambda group: dist.all_to_all_single(torch.ones(4), torch.ones(4), [4], [2, 2], group),
    ),
    "splits, sum": (
        "Split sizes doesn't match total dim 0 size",
        lambda group: dist.all_to_all_single(torch.ones(4), torch.ones(4), [1, 1], [2, 2], group),
    ),
    "broadcast, root": (
        "invalid root rank: 5",
        lambda group: group.broadcast([TWO], rooted(dist.BroadcastOptions, 5)).wait(),
    ),
    "reduce, root": (
        "invalid root rank: -1",
        lambda group: group.reduce([TWO], rooted(dist.ReduceOptions, -1)).wait(),
    ),
    "bits of floats": (
        "Cannot use ReduceOp.BAND with non-integral dtype",
        lambda group: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND, group),
    ),
}


def late_barrier(group: Any) -> None:
    dist.monitored_barrier(group, timeout=SOON)


def late_all_reduce(group: Any) -> None:
    dist.distributed_c10d._set_pg_timeout(SOON, group)
    dist.all_reduce(torch.ones(2), group=group)


# Rank 1 does not come. The group is over afterwards.
LATE = {
    "monitored_barrier": (
        "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 200 ms",
        late_barrier,
    ),
    "deadline": ("Timed out waiting", late_all_reduce),
}


def raise_all() -> dict[str, tuple[Raised, Raised]]:
    """Mistakes that a rank finds by itself; those that need a peer are rank 0's alone."""
    backends = ("paceline", "gloo")
    found = {}
    if dist.get_rank() == 0:
        groups = [dist.new_group(backend=backend) for backend in backends]
        for name, (_, make) in MISTAKES.items():
            found[name] = tuple(error_of(lambda g=g, make=make: make(g)) for g in groups)
    else:
        for backend in backends:
            dist.new_group(backend=backend)
    for name, (_, make) in LATE.items():
        groups = [dist.new_group(backend=backend) for backend in backends]
        if dist.get_rank() == 0:
            found[name] = tuple(error_of(lambda g=g, make=make: make(g)) for g in groups)
        dist.barrier()
    return found  # type: ignore[return-value]


@pytest.fixture(scope="module")
def raised() -> dict[str, tuple[Raised, Raised]]:
    return run_ranks(2, raise_all)[0]


@pytest.mark.parametrize("name", [*MISTAKES, *LATE])
def test_has_the_phrase_of_gloo(name: str, raised: dict[str, tuple[Raised, Raised]]) -> None:
    check((MISTAKES | LATE)[name][0], *raised[name])


@pytest.mark.slow
def test_different_sizes_have_the_phrase_of_torchs_detailed_mode() -> None:
    def on_rank(backend: str) -> Raised:
        if backend == "gloo":
            dist.set_debug_level(dist.DebugLevel.DETAIL)
        group = dist.new_group(backend=backend)
        size = 2 + dist.get_rank()
        return error_of(lambda: dist.all_reduce(torch.ones(size), group=group))

    ours = run_ranks(2, on_rank, "paceline")
    torchs = run_ranks(2, on_rank, "gloo")
    for pair in zip(ours, torchs, strict=True):
        check("Detected mismatch between collectives on ranks", *pair)


@pytest.mark.parametrize("backend", ["paceline", "gloo"])
def test_a_rank_that_is_gone(backend: str) -> None:
    """gloo says one or the other, as the kernel does."""

    def on_rank() -> None:
        group = dist.new_group(backend=backend)
        dist.all_reduce(torch.ones(2), group=group)
        if dist.get_rank() == 1:
            os._exit(7)
        dist.all_reduce(torch.ones(1 << 20), group=group)

    with pytest.raises(RanksFailedError, match=r"Connection (closed|reset) by peer"):
        run_ranks(2, on_rank)
