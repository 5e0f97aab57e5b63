"""Every hook keeps what its documentation promises, on every kind of bucket."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.testing import run_ranks
from tests.hooks.cases import CASES, EPS, Bucket, Case
from tests.hooks.grouped_cases import run_together

WORLDS = (pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow))
SHAPES = {
    "one": [(1,)],
    "few": [(7,)],
    "some": [(20, 30), (20,), (8, 3, 3, 3)],
    "many": [(300, 301), (300,), (64, 3, 3, 3), (5,)],
}
KINDS = ("normal", "zeros", "huge")
BUCKETS = [
    *((torch.float32, name) for name in SHAPES),
    *(
        (dtype, n)
        for dtype in (torch.float16, torch.bfloat16, torch.float64)
        for n in ("one", "some")
    ),
]


def inputs(kind: str, numel: int, rank: int, dtype: torch.dtype, largest: float) -> Tensor:
    generator = torch.Generator().manual_seed(rank + 1)
    values = torch.randn(numel, generator=generator, dtype=torch.float64)
    if kind == "zeros":
        values.zero_()
    if kind == "huge" and rank == 1:
        # Several ranks may not sum to infinity in 16 bits.
        values[numel // 2] = min(largest, 0.5 * torch.finfo(dtype).max)
    return values.to(dtype)


def reduce_once(case: Case, buffer: Tensor, parameters: list[Tensor]) -> Tensor:
    state, hook = case.make()
    result: Tensor = hook(state, Bucket(buffer, parameters)).wait()
    return result


def assert_same_bits(result: Tensor, what: str) -> None:
    flat = result.contiguous().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    mine = flat.view(torch.uint8)
    everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, mine)
    assert all(torch.equal(mine, other) for other in everybody), f"{what}: ranks differ"


def check(case: Case, kind: str, name: str, dtype: torch.dtype) -> None:
    what = f"{name}, {kind}, {dtype}"
    parameters = [torch.zeros(shape, dtype=dtype) for shape in SHAPES[name]]
    numel = sum(p.numel() for p in parameters)
    world = dist.get_world_size()
    everybody = torch.stack(
        [inputs(kind, numel, rank, dtype, case.largest).double() for rank in range(world)]
    )
    mine = inputs(kind, numel, dist.get_rank(), dtype, case.largest)
    result = reduce_once(case, mine, parameters)
    assert result.dtype == dtype, what
    assert result.shape == mine.shape, what
    error = (result.double() - everybody.mean(dim=0)).abs()
    rounding = 4 * EPS[dtype] * (everybody.abs().mean(dim=0) + everybody.mean(dim=0).abs())
    # Below the smallest normal number of a format there are no bits left to be precise with.
    allowed = case.bound(everybody) + rounding + 2 * torch.finfo(dtype).tiny + 6e-8
    worst = (error - allowed).max().item()
    assert not math.isnan(worst), f"{what}: NaN"
    assert worst <= 0, f"{what}: error {error.max()} is above {allowed[(error - allowed).argmax()]}"
    assert_same_bits(result, what)


def check_buckets(name: str) -> None:
    for dtype, shapes in BUCKETS:
        for kind in KINDS:
            check(CASES[name], kind, shapes, dtype)


@functools.cache
def wrong_in_world(world: int) -> dict[str, str]:
    return run_together(world, check_buckets, list(CASES))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", CASES)
def test_mean_of_all_ranks(name: str, world: int) -> None:
    assert name not in wrong_in_world(world), wrong_in_world(world)[name]


LARGE = ("allreduce", "bf16", "int8", "e4m3", "e5m2", "sign", "topk 10 %", "topk, all")


def test_large_values_on_every_rank() -> None:
    """A mean is in range if its parts are: no sum of all ranks or of a block may overflow."""

    def on_rank() -> None:
        numel = 2000
        generator = torch.Generator().manual_seed(dist.get_rank())
        values = 3e38 * (0.75 + 0.25 * torch.rand(numel, generator=generator))
        for name in LARGE:
            result = reduce_once(CASES[name], values.clone(), [torch.zeros(numel)])
            assert torch.isfinite(result).all(), name
        state, hook = CASES["powersgd"].make()  # what it does not compress
        result = hook(state, Bucket(values.clone(), [torch.zeros(numel)])).wait()
        assert torch.isfinite(result).all()

    run_ranks(3, on_rank)


def test_nothing_to_reduce() -> None:
    """Parameters without elements, alone in a bucket or beside others."""

    def on_rank() -> None:
        for name, case in CASES.items():
            for shapes in ([(0,)], [(0, 4), (3,)]):
                parameters = [torch.zeros(shape) for shape in shapes]
                numel = sum(p.numel() for p in parameters)
                result = reduce_once(case, torch.ones(numel), parameters)
                assert result.numel() == numel, name

    run_ranks(2, on_rank)


COMPLEX = [name for name, case in CASES.items() if case.takes_complex]


def check_complex(name: str) -> None:
    case = CASES[name]
    numel = 600
    generators = [torch.Generator().manual_seed(r) for r in range(dist.get_world_size())]
    values = [torch.randn(numel, generator=g, dtype=torch.complex64) for g in generators]
    everybody = torch.stack([torch.view_as_real(v).reshape(-1) for v in values]).double()
    result = reduce_once(
        case, values[dist.get_rank()].clone(), [torch.zeros(20, 30, dtype=torch.complex64)]
    )
    assert result.dtype == torch.complex64
    error = (torch.view_as_real(result).reshape(-1).double() - everybody.mean(dim=0)).abs()
    assert (error <= case.bound(everybody) + 1e-6).all()
    assert_same_bits(result, name)


@functools.cache
def wrong_when_complex() -> dict[str, str]:
    return run_together(2, check_complex, COMPLEX)


@pytest.mark.parametrize("name", COMPLEX)
def test_complex(name: str) -> None:
    assert name not in wrong_when_complex(), wrong_when_complex()[name]


FEEDBACK = [name for name, case in CASES.items() if case.feedback]


def check_drift(name: str) -> None:
    case = CASES[name]
    state, hook = case.make()
    parameters = [torch.zeros(24, 20), torch.zeros(24)]
    world, rank = dist.get_world_size(), dist.get_rank()
    drift = torch.zeros(504, dtype=torch.float64)
    distances = []
    for step in range(3 * case.converges_after):
        generator = torch.Generator().manual_seed(step)
        # With a mean: what is always left out would add up.
        values = 0.3 + torch.randn(world, 504, generator=generator)
        buffer = values[rank].clone()
        hook(state, Bucket(buffer, parameters)).wait()
        drift += buffer.double() - values.double().mean(dim=0)
        distances.append(drift.norm().item())
    third = case.converges_after
    early, late = max(distances[:third]), max(distances[2 * third :])
    assert late <= 1.5 * early + 1e-4, f"{early} grew to {late}"
    assert late < 0.6 * math.sqrt(504) * 0.3 * 3 * third


@functools.cache
def wrong_drift() -> dict[str, str]:
    return run_together(3, check_drift, FEEDBACK)


@pytest.mark.parametrize("name", FEEDBACK)
def test_errors_do_not_accumulate(name: str) -> None:
    """The running sum of what comes out follows the running sum of the true means."""
    assert name not in wrong_drift(), wrong_drift()[name]


def test_without_feedback_errors_accumulate() -> None:
    """The test above can fail: a value that is always rounded away never arrives."""

    def on_rank() -> float:
        for feedback, arrives in ((False, False), (True, True)):
            case_state = CASES["int8"].make()[0]
            case_state.error_feedback = feedback
            hook = CASES["int8"].make()[1]
            parameters = [torch.zeros(64)]
            total = 0.0
            for _ in range(20):
                buffer = torch.tensor([1000.0] + [1.0] * 63)
                total += hook(case_state, Bucket(buffer, parameters)).wait()[5].item()
            assert (abs(total - 20.0) < 8.0) is arrives, (feedback, total)
        return total

    run_ranks(2, on_rank)
