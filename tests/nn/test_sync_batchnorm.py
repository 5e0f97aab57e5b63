"""SyncBatchNorm equals BatchNorm on the concatenated batch, on ranks with any batch sizes."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.nn import SyncBatchNorm
from paceline.testing import run_ranks
from tests.nn.compare import Case, assert_same_as_whole, whole

BASE = Case(sizes=(4, 4))
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(BASE, id="even"),
        pytest.param(replace(BASE, sizes=(1, 1)), id="one each"),
        pytest.param(replace(BASE, sizes=(6, 1, 3)), id="uneven"),
        pytest.param(replace(BASE, sizes=(5, 0)), id="one empty"),
        pytest.param(replace(BASE, sizes=(0, 4, 0)), id="only one has values"),
        pytest.param(replace(BASE, shape=(7,), sizes=(5, 3)), id="2d"),
        pytest.param(replace(BASE, shape=(7, 4), sizes=(5, 3)), id="3d"),
        pytest.param(replace(BASE, shape=(3, 2, 4, 2), sizes=(2, 3)), id="5d"),
        pytest.param(replace(BASE, memory_format=torch.channels_last), id="channels last"),
        pytest.param(
            replace(BASE, shape=(3, 2, 4, 2), memory_format=torch.channels_last_3d),
            id="channels last 3d",
        ),
        pytest.param(replace(BASE, options={"affine": False}), id="no affine"),
        pytest.param(replace(BASE, options={"momentum": None}, steps=4), id="cumulative"),
        pytest.param(replace(BASE, options={"track_running_stats": False}), id="no statistics"),
        pytest.param(replace(BASE, options={"momentum": 0.7, "eps": 0.1}), id="momentum, eps"),
        pytest.param(replace(BASE, shift=500.0), id="large mean"),
    ],
)
def test_equals_batchnorm_on_the_concatenated_batch(case: Case) -> None:
    tolerance = {"rtol": 1e-3, "atol": 2e-3} if case.shift > 100 else CLOSE
    for rank, result in enumerate(assert_same_as_whole(case, **tolerance)):
        assert result.collectives == [(1, 1)] * case.steps
        assert all(len(y) == case.sizes[rank] for y in result.outputs)


def test_double_precision_is_kept() -> None:
    case = replace(BASE, sizes=(5, 2), dtype=torch.float64, module_dtype=torch.float64)
    assert_same_as_whole(case, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("module_dtype", [torch.float32, None], ids=["mixed", "all low"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_mixed_precision(
    dtype: torch.dtype, module_dtype: torch.dtype | None, memory_format: torch.memory_format
) -> None:
    case = replace(
        BASE,
        sizes=(5, 3),
        dtype=dtype,
        module_dtype=module_dtype or dtype,
        memory_format=memory_format,
        options={} if module_dtype else {"track_running_stats": False},
    )
    low = 2e-3 if dtype is torch.float16 else 2e-2
    ranks = assert_same_as_whole(case, rtol=4 * low, atol=4 * low)
    for result in ranks:
        assert result.outputs[0].dtype is dtype
        assert result.input_gradients[0].dtype is dtype
        assert result.outputs[0].is_contiguous(memory_format=memory_format)


def test_autocast() -> None:
    case = replace(BASE, sizes=(5, 3), autocast=True, dtype=torch.bfloat16)
    assert_same_as_whole(case, rtol=5e-2, atol=5e-2)


def test_more_precise_than_one_batchnorm_in_the_same_dtype() -> None:
    """The error against double precision is not larger than BatchNorm's own, by much."""
    case = replace(BASE, sizes=(6, 3), shift=50.0, steps=1)
    exact = whole(case, torch.float64)
    ours = assert_same_as_whole(case, rtol=1e-2, atol=1e-2)
    plain = whole(case)
    error = (torch.cat([r.outputs[0] for r in ours]) - exact.outputs[0]).abs().max()
    reference = (plain.outputs[0] - exact.outputs[0]).abs().max()
    assert error <= 4 * reference + 1e-6


def test_all_ranks_empty() -> None:
    def train() -> tuple[torch.Size, int, bool]:
        layer = SyncBatchNorm(3)
        x = torch.empty(0, 3, 4, requires_grad=True)
        y = layer(x)
        y.sum().backward()
        assert layer.weight.grad is not None
        return y.shape, int(layer.num_batches_tracked or 0), bool(layer.weight.grad.any())

    assert run_ranks(2, train) == [(torch.Size([0, 3, 4]), 1, False)] * 2


def test_one_value_over_all_ranks_raises_on_every_rank() -> None:
    def train() -> str:
        layer = SyncBatchNorm(3)
        with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
            layer(torch.randn(1 - dist.get_rank(), 3))
        return type(caught.value).__name__

    assert run_ranks(2, train) == ["NormInputError"] * 2


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((3,), "at least 2D input"),
        ((2, 0), "has 0"),
        ((2, 4), r"3 channels.*dimension 1 has 4"),
    ],
)
def test_inputs_that_cannot_be_normalised(shape: tuple[int, ...], text: str) -> None:
    with pytest.raises(paceline.errors.NormInputError, match=text):
        SyncBatchNorm(3)(torch.randn(shape))


def test_without_a_group_and_in_eval_it_is_batchnorm() -> None:
    plain, ours = nn.BatchNorm2d(3), SyncBatchNorm(3)
    x = torch.randn(4, 3, 5, 5)
    for _ in range(2):
        assert torch.equal(plain(x), ours(x))
    torch.testing.assert_close(dict(ours.state_dict()), dict(plain.state_dict()))
    assert torch.equal(plain.eval()(x), ours.eval()(x))
    with pytest.raises(ValueError, match="more than 1 value"):
        SyncBatchNorm(3)(torch.randn(1, 3))


def test_eval_needs_no_peer() -> None:
    def evaluate() -> bool:
        layer = SyncBatchNorm(3).eval()
        x = torch.randn(2, 3)
        if dist.get_rank() == 0:
            return bool(torch.equal(layer(x), nn.BatchNorm1d(3).eval()(x)))
        return True

    assert run_ranks(2, evaluate) == [True, True]


def test_process_group_argument() -> None:
    """Two groups of two: each normalises over its own ranks."""

    def train() -> torch.Tensor:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        layer = SyncBatchNorm.convert_sync_batchnorm(
            nn.Sequential(nn.BatchNorm1d(2)), groups[dist.get_rank() // 2]
        )
        layer(torch.full((2, 2), float(dist.get_rank())))
        return layer[0].running_mean.clone()

    means = run_ranks(4, train)
    expected = [0.05, 0.05, 0.25, 0.25]
    for mean, value in zip(means, expected, strict=True):
        torch.testing.assert_close(mean, torch.full((2,), value))


def test_no_collective_in_backward_when_the_input_needs_no_gradient() -> None:
    def train() -> int:
        from paceline.torch_private.groups import collectives_started

        layer = SyncBatchNorm(3)
        y = layer(torch.randn(4, 3))
        before = collectives_started(dist.group.WORLD)
        y.sum().backward()
        assert layer.weight.grad is not None
        return collectives_started(dist.group.WORLD) - before

    assert run_ranks(2, train) == [0, 0]


def test_convert_keeps_everything() -> None:
    shared = nn.BatchNorm1d(4, momentum=0.3, eps=1e-3)
    model = nn.Sequential(
        nn.Linear(4, 4), shared, nn.Sequential(shared, nn.BatchNorm2d(4, affine=False)), nn.ReLU()
    )
    model[2].eval()
    before = dict(copy.deepcopy(model).state_dict())
    parameters = list(model.parameters())
    converted = SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    kinds = [type(m).__name__ for m in model.modules() if "Norm" in type(m).__name__]
    assert kinds == ["SyncBatchNorm", "SyncBatchNorm"]
    assert model[1] is model[2][0]
    assert isinstance(model[1], torch.nn.SyncBatchNorm)
    assert (model[1].momentum, model[1].eps, model[1].training) == (0.3, 1e-3, False)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    torch.testing.assert_close(dict(model.state_dict()), before)
    alone = SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm3d(2))
    assert isinstance(alone, SyncBatchNorm)
    linear = nn.Linear(2, 2)
    assert SyncBatchNorm.convert_sync_batchnorm(linear) is linear


def test_convert_of_a_lazy_layer() -> None:
    with pytest.raises(RuntimeError, match=r"LazyBatchNorm1d.*one batch"):
        SyncBatchNorm.convert_sync_batchnorm(nn.LazyBatchNorm1d())


def test_pickles_and_copies() -> None:
    layer = SyncBatchNorm(3)
    assert torch.equal(copy.deepcopy(layer).weight, layer.weight)


def test_second_derivative_is_refused() -> None:
    def train() -> str:
        x = torch.randn(4, 3, requires_grad=True)
        (slope,) = torch.autograd.grad(SyncBatchNorm(3)(x).pow(2).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable") as caught:
            slope.sum().backward()
        return type(caught.value).__name__

    assert run_ranks(2, train) == ["RuntimeError"] * 2


@pytest.mark.may_leave("environ")  # the first optimizer step imports the compiler
def test_under_ddp_training_equals_one_process() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

    def data() -> torch.Tensor:
        return torch.randn(12, 6, generator=torch.Generator().manual_seed(1))

    def train() -> dict[str, torch.Tensor]:
        model = paceline.DistributedDataParallel(SyncBatchNorm.convert_sync_batchnorm(build()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            model(data().chunk(2)[dist.get_rank()]).square().mean().backward()
            optimizer.step()
        return dict(model.module.state_dict())

    plain = build()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        plain(data()).square().mean().backward()
        optimizer.step()
    for state in run_ranks(2, train):
        torch.testing.assert_close(state, dict(plain.state_dict()), rtol=1e-4, atol=1e-5)
