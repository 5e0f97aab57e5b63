"""The same bits: on every rank, on every run, however the work is cut; sums in the order of ranks.

Of paceline on one host only. And what it does where gloo refuses, or is wrong.
"""

from __future__ import annotations

import hashlib

import pytest
import torch
import torch.distributed as dist

from paceline.errors import CollectiveMismatchError
from paceline.testing import run_ranks
from tests.shm.contract import reference

SIZE = 100_003
HOLES = slice(None, None, 2)


def _wide(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers so different in size that every order of adding them has bits of its own."""
    source = torch.Generator().manual_seed(rank)
    exponents = torch.randint(-20, 20, (SIZE,), generator=source)
    return torch.randn(SIZE, dtype=dtype, generator=source) * 2.0**exponents


def _in_pieces(tensor: torch.Tensor, length: int) -> torch.Tensor:
    works = [dist.all_reduce(piece, async_op=True) for piece in tensor.split(length)]
    for work in works:
        work.wait()
    return tensor


def _in_parts(mine: torch.Tensor) -> torch.Tensor:
    """Sum by reduce_scatter, and bring the parts together."""
    world = dist.get_world_size()
    padded = torch.nn.functional.pad(mine, (0, -len(mine) % world))
    part = torch.empty_like(padded[: len(padded) // world])
    dist.reduce_scatter_single(part, padded)
    dist.all_gather_single(padded, part)
    return padded[: len(mine)]


def _every_way(mine: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sum in every way that there is."""
    found = {}
    for run in range(3):
        found[f"run {run}"] = mine.clone()
        dist.all_reduce(found[f"run {run}"])
    for length in (1000, 4097, 33_331, 65_536):
        found[f"pieces of {length}"] = _in_pieces(mine.clone(), length)
    found["parts"] = _in_parts(mine)
    found["to one"] = mine.clone()
    dist.reduce(found["to one"], 0)
    dist.broadcast(found["to one"], 0)
    found["not contiguous"] = torch.stack([mine, mine], 1)[:, 0]
    dist.all_reduce(found["not contiguous"])
    return found


def sum_every_way(dtype: torch.dtype) -> tuple[list[str], str]:
    """Return the ways whose bits are not those of a loop over the ranks, and a digest of all."""
    rank, world = dist.get_rank(), dist.get_world_size()
    total = _wide(0, dtype)
    for peer in range(1, world):
        total = total + _wide(peer, dtype)
    if world > 2:  # or the test shows nothing
        assert not torch.equal(sum(_wide(r, dtype) for r in reversed(range(world))), total)
    found = _every_way(_wide(rank, dtype))
    wrong = [way for way, result in found.items() if not torch.equal(result, total)]
    data = torch.cat([each.contiguous() for each in found.values()])
    return wrong, hashlib.sha256(data.numpy().tobytes()).hexdigest()


def sum_dtypes() -> list[tuple[list[str], str]]:
    return [sum_every_way(dtype) for dtype in (torch.float32, torch.float64)]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_run_in_rank_order_with_the_same_bits_everywhere(ranks: int) -> None:
    found = run_ranks(ranks, sum_dtypes, backend="paceline")
    assert [wrong for wrong, _ in found[0]] == [[], []]
    assert found == [found[0]] * ranks


# --- beyond gloo ---------------------------------------------------------------------------------


def half_precision() -> list[bool]:
    """Sums that half precision cannot hold on the way: 1 and three halves of its last bit."""
    rank, same = dist.get_rank(), []
    for dtype, small in ((torch.float16, 2.0**-11), (torch.bfloat16, 2.0**-8)):
        tensor = torch.full((1000,), small if rank else 1.0, dtype=dtype)
        dist.all_reduce(tensor)
        total = torch.tensor(1 + small * (dist.get_world_size() - 1)).to(dtype)
        same.append(bool((tensor == total).all()) and float(total) > 1)
    return same


def test_half_precision_is_added_up_in_float32() -> None:
    assert run_ranks(4, half_precision, backend="paceline") == [[True, True]] * 4


def other_dtypes() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for op in reference.ops_of("int32"):
        parts = [reference.make(1003, "int16", peer) for peer in range(world)]
        tensor = parts[rank].clone()
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
        assert torch.equal(tensor, reference.reduce(parts, op))
    for dtype in (torch.uint16, torch.uint64, torch.float8_e4m3fn):
        outputs = [torch.zeros(9).to(dtype) for _ in range(world)]
        dist.all_gather(outputs, torch.full((9,), float(rank)).to(dtype))
        assert [float(each[-1]) for each in outputs] == list(range(world))
    sizes = [[peer + 2 * rank for peer in range(world)], [rank + 2 * p for p in range(world)]]
    outputs = [torch.zeros(size) for size in sizes[0]]
    dist.all_to_all(outputs, [torch.full((size,), float(rank)) for size in sizes[1]])
    assert all(bool((each == peer).all()) for peer, each in enumerate(outputs))


def test_dtypes_and_sizes_that_gloo_refuses() -> None:
    run_ranks(3, other_dtypes, backend="paceline")


def future_of_a_mismatch() -> int:
    rank, world = dist.get_rank(), dist.get_world_size()
    heard: list[bool] = []
    works = [dist.all_reduce(torch.ones(size), async_op=True) for size in (3, 4 + rank, 3)]
    futures = [work.get_future() for work in works]
    futures[1].add_done_callback(lambda done: heard.append(done.done()))
    with pytest.raises(CollectiveMismatchError, match="rank 0 brought all_reduce"):
        futures[1].wait()
    with pytest.raises(CollectiveMismatchError):
        works[1].wait()
    assert isinstance(works[1].exception(), CollectiveMismatchError)
    assert works[1].is_completed()
    assert [work.is_success() for work in (works[0], works[1])] == [True, False]
    assert bool((futures[2].wait()[0] == world).all())
    return len(heard)


def test_a_mismatch_is_the_exception_of_work_and_future() -> None:
    assert run_ranks(2, future_of_a_mismatch, backend="paceline") == [1, 1]


def _holes(value: float) -> torch.Tensor:
    """A view of every second column; the others are -1 and must stay so."""
    whole = torch.full((4, 20), -1.0)
    whole[:, HOLES] = value
    return whole[:, HOLES]


def _is_right(view: torch.Tensor, value: float) -> bool:
    whole = torch.as_strided(view, (4, 20), (20, 1), 0)
    return bool((view == value).all()) and bool((whole[:, 1::2] == -1).all())


def views_with_holes() -> list[str]:
    """Every collective on tensors that are neither contiguous nor dense; return what is wrong."""
    rank, world = dist.get_rank(), dist.get_world_size()
    results: dict[str, list[tuple[torch.Tensor, float]]] = {}

    mine = _holes(rank)
    dist.all_reduce(mine)
    results["all_reduce"] = [(mine, sum(range(world)))]
    mine = _holes(rank + 1)
    dist.reduce(mine, 0, dist.ReduceOp.MAX)
    results["reduce"] = [(mine, world if rank == 0 else rank + 1)]
    mine = _holes(rank)
    dist.broadcast(mine, 1)
    results["broadcast"] = [(mine, 1)]
    many = [_holes(0) for _ in range(world)]
    dist.all_gather(many, _holes(rank))
    results["all_gather"] = list(zip(many, range(world), strict=True))
    mine = _holes(0)
    dist.reduce_scatter(mine, [_holes(part) for part in range(world)])
    results["reduce_scatter"] = [(mine, rank * world)]
    many = [_holes(0) for _ in range(world)]
    dist.all_to_all(many, [_holes(rank + 10 * part) for part in range(world)])
    results["all_to_all"] = [(many[peer], peer + 10 * rank) for peer in range(world)]
    mine = _holes(0)
    dist.scatter(mine, [_holes(part) for part in range(world)] if rank == 1 else None, 1)
    results["scatter"] = [(mine, rank)]
    many = [_holes(0) for _ in range(world)]
    dist.gather(_holes(rank), many if rank == 1 else None, 1)
    results["gather"] = list(zip(many, range(world), strict=True)) if rank == 1 else []
    return [name for name, pairs in results.items() if not all(_is_right(*pair) for pair in pairs)]


def test_views_with_holes() -> None:
    assert run_ranks(3, views_with_holes, backend="paceline") == [[]] * 3
