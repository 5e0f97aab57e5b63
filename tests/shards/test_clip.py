"""``paceline.clip_grad_norm_`` clips as torch's does, in an order of its own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import paceline
from paceline.errors import ConfigurationError, NonFiniteGradientError
from paceline.shards.clip import PIECE


def parameters(dtype: torch.dtype = torch.float32, *, sparse: bool = False) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for shape in ((3, PIECE), (5,), ()):
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
        parameter.grad = torch.randn(shape, generator=generator, dtype=dtype)
        found.append(parameter)
    if sparse:
        parameter = nn.Parameter(torch.zeros(4, 2, dtype=dtype))
        rows = torch.randn(3, 2, generator=generator, dtype=dtype)
        parameter.grad = torch.sparse_coo_tensor([[1, 3, 1]], rows, (4, 2), check_invariants=True)
        found.append(parameter)
    return [*found, nn.Parameter(torch.zeros(2))]  # without a gradient


@pytest.mark.parametrize("order", [2.0, 1, 3.5, 0.5, math.inf, "inf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_as_torch(order: float, dtype: torch.dtype, max_norm: float) -> None:
    mine, theirs = parameters(dtype), parameters(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    whole = torch.cat([p.grad.flatten().to(wide) for p in mine if p.grad is not None])
    norm = paceline.clip_grad_norm_(mine, max_norm, order)
    expected = nn.utils.clip_grad_norm_(theirs, max_norm, float(order))
    assert norm.dtype == expected.dtype
    assert norm.item() == pytest.approx(torch.linalg.vector_norm(whole, float(order)).item())
    # Torch adds up in float32, in an order that depends on its threads.
    assert norm.item() == pytest.approx(expected.item(), rel=1e-4)
    for left, right in zip(mine, theirs, strict=True):
        if left.grad is not None:
            torch.testing.assert_close(left.grad, right.grad, rtol=1e-4, atol=1e-12)


def test_the_widest_dtype_is_returned() -> None:
    mine, theirs = ([*parameters(torch.bfloat16), *parameters(torch.float32)[:2]] for _ in range(2))
    found = paceline.clip_grad_norm_(mine, 1e9)
    expected = nn.utils.clip_grad_norm_(theirs, 1e9)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)


def test_sparse_gradients() -> None:
    mine = parameters(sparse=True)
    dense = [None if p.grad is None else p.grad.to_dense().double() for p in mine]
    squares = sum(float(each.square().sum()) for each in dense if each is not None)
    norm = paceline.clip_grad_norm_(iter(mine), 0.5)
    assert norm.item() == pytest.approx(math.sqrt(squares), rel=1e-6)
    gradient = mine[3].grad
    assert gradient is not None
    assert gradient.is_sparse
    expected = dense[3] * (0.5 / (math.sqrt(squares) + 1e-6))
    torch.testing.assert_close(gradient.to_dense().double(), expected, rtol=1e-5, atol=1e-9)


def test_the_same_bits_at_any_number_of_threads_and_in_any_order() -> None:
    found = set()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for turn in (1, -1):
            mine = parameters()
            norm = paceline.clip_grad_norm_(mine[::turn], 0.5)
            assert mine[0].grad is not None
            found.add((norm.item(), mine[0].grad.numpy().tobytes()))
    torch.set_num_threads(1)
    assert len(found) == 1


@pytest.mark.parametrize(("value", "norm"), [(math.nan, math.nan), (math.inf, math.inf)])
def test_what_is_not_finite(value: float, norm: float) -> None:
    """Nothing is clipped, and the norm says why."""
    mine = parameters()
    assert mine[1].grad is not None
    mine[1].grad[2] = value
    before = [None if p.grad is None else p.grad.clone() for p in mine]
    found = paceline.clip_grad_norm_(mine, 0.5)
    assert found.item() == norm or (math.isnan(norm) and found.isnan())
    for parameter, old in zip(mine, before, strict=True):
        if old is not None:
            assert parameter.grad is not None
            assert torch.equal(parameter.grad.nan_to_num(), old.nan_to_num())
    assert found.dtype == torch.float32
    with pytest.raises(NonFiniteGradientError):
        paceline.clip_grad_norm_(mine, 0.5, error_if_nonfinite=True)


def test_no_gradients_and_orders_that_are_none() -> None:
    assert paceline.clip_grad_norm_(nn.Parameter(torch.ones(2)), 1.0).item() == 0.0
    assert paceline.clip_grad_norm_([], 1.0).item() == 0.0
    empty = nn.Parameter(torch.ones(0))
    empty.grad = torch.ones(0)
    assert paceline.clip_grad_norm_(empty, 1.0, math.inf).item() == 0.0
    for order in (0, -1, math.nan):
        with pytest.raises(ConfigurationError, match="write a positive number"):
            paceline.clip_grad_norm_([], 1.0, order)
