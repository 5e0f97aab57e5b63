"""One test for each of ``DataParallel`` in torch's test_data_parallel.py, under its name."""

from __future__ import annotations

import gc
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from tests.dp.compare import CPUS, assert_same_as_plain, run

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


class Wrapped(nn.Module):
    """Takes its input by keyword, in a dict."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input: Any) -> torch.Tensor:
        data = input["data"] if isinstance(input, dict) else input
        return torch.as_tensor(self.inner(data))


def test_data_parallel_buffers_requiring_grad() -> None:
    class Model(nn.Module):
        def __init__(self, t: torch.Tensor) -> None:
            super().__init__()
            self.register_buffer("t_rg", t)
            self.register_buffer("t_not_rg", t.clone().detach())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.t_rg + self.t_not_rg

    model = Model(torch.randn(10, dtype=torch.double, requires_grad=True))
    parallel = paceline.DataParallel(model, CPUS)
    x = torch.randn(2, 10, dtype=torch.double)
    assert torch.autograd.gradcheck(lambda _: parallel(x), (model.t_rg,))
    assert torch.autograd.gradgradcheck(lambda _: parallel(x).pow(3), (model.t_rg,))
    assert not model.t_not_rg.requires_grad


def test_data_parallel_complex() -> None:
    class Cplx(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, dtype=torch.cfloat))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    assert_same_as_plain(Cplx(), torch.randn(6, 4, dtype=torch.cfloat))


def test_data_parallel_device_args() -> None:
    layer, x = nn.Linear(10, 5), torch.randn(20, 10, requires_grad=True)
    cpu = torch.device("cpu")
    for ids in (("cpu", "cpu"), (cpu, cpu), [cpu, "cpu:0"]):
        for output_device in ("cpu", cpu, None):
            out = paceline.data_parallel(layer, x, device_ids=ids, output_device=output_device)
            torch.testing.assert_close(out, layer(x))


def test_data_parallel_function_deletion() -> None:
    """The gradient of an input, differentiated again, when nobody holds the first graph."""

    def penalty(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        output = net(x)
        (slope,) = torch.autograd.grad(output, x, torch.ones_like(output), create_graph=True)
        return slope.mean()

    net = nn.Linear(4, 1)
    x = torch.ones(2, 4, requires_grad=True)
    penalty(paceline.DataParallel(net, CPUS), x).backward()
    torch.testing.assert_close(net.weight.grad, torch.full((1, 4), 0.25))
    assert net.bias.grad is None or not net.bias.grad.any()


def test_data_parallel_lazy_linear() -> None:
    model = paceline.DataParallel(nn.Sequential(nn.LazyLinear(2)), CPUS)
    with pytest.raises(RuntimeError, match=r"uninitialized.*0\.weight.*one batch") as caught:
        model(torch.randn(4, 10))
    assert isinstance(caught.value, paceline.errors.UntrainableModuleError)
    model.module(torch.randn(4, 10))
    assert model(torch.randn(4, 10)).shape == (4, 2)


def test_data_parallel_model_device() -> None:
    layer = nn.Linear(2, 2)
    x = torch.randn(2, 2)
    assert paceline.DataParallel(layer, CPUS)(x).shape == (2, 2)
    half_there = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    for module in (half_there, nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, device="meta"))):
        with pytest.raises(RuntimeError, match=r"device cpu.*on device: meta.*1\.weight") as caught:
            paceline.DataParallel(module, CPUS)(x)
        assert isinstance(caught.value, paceline.errors.PlacementError)
        assert caught.value.parameters == ("1.weight",)
        with pytest.raises(RuntimeError, match=r"on device: meta.*1\.weight"):
            paceline.data_parallel(module, x, CPUS)
    with pytest.raises(RuntimeError, match=r"device meta.*on device: cpu.*weight"):
        paceline.DataParallel(layer, ["meta", "cpu"])(x)


def test_data_parallel_model_no_refcycles() -> None:
    model = paceline.DataParallel(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)), CPUS)
    x = torch.randn(4, 1)
    model(x).sum().backward()
    gc.collect()
    for _ in range(3):
        model(x).sum().backward()
    assert gc.collect() == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_data_parallel_module(dtype: torch.dtype) -> None:
    assert_same_as_plain(nn.Linear(10, 5).to(dtype), torch.randn(20, 10, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_data_parallel_module_kwargs_only(dtype: torch.dtype) -> None:
    x = torch.randn(20, 10, dtype=dtype)
    assert_same_as_plain(Wrapped(nn.Linear(10, 5).to(dtype)), input=x)


@pytest.mark.parametrize("empty", [[], {}, ()], ids=["list", "dict", "tuple"])
def test_data_parallel_module_kwargs_only_empty(empty: Any) -> None:
    x = torch.randn(20, 10)
    assert_same_as_plain(Wrapped(nn.Linear(10, 5)), input={"data": x, "unused": empty})


def test_data_parallel_module_zero_inputs() -> None:
    class Constant(nn.Module):
        def forward(self) -> torch.Tensor:
            return torch.full((3,), 2.0)

    assert torch.equal(paceline.DataParallel(Constant(), CPUS)(), torch.full((3,), 2.0))
    assert torch.equal(paceline.data_parallel(Constant(), None, CPUS), torch.full((3,), 2.0))


def test_data_parallel_multiple_input() -> None:
    class Model(nn.Module):
        def forward(
            self, a: torch.Tensor, b: torch.Tensor, factor: float, c: torch.Tensor | None = None
        ) -> torch.Tensor:
            return factor * (a * b if c is None else a * b + c)

    a = torch.randn(5, 5, requires_grad=True)
    b = torch.randn(5, 5, requires_grad=True)
    c = torch.randn(5, 5)
    assert_same_as_plain(Model(), a, b, 0.5)
    assert_same_as_plain(Model(), a, b, 0.5, c=c)
    assert_same_as_plain(Model(), a, b, 0.5, c=c, devices=["cpu"])
    expected = Model()(a, b, 0.5, c)
    for devices in (CPUS, ["cpu"]):
        out = paceline.data_parallel(Model(), (a, b, 0.5), devices, module_kwargs={"c": c})
        torch.testing.assert_close(out, expected)


def test_data_parallel_nested_input() -> None:
    class Model(nn.Module):
        def forward(self, *inputs: Any) -> Any:
            return inputs[1][0]

    x = torch.randn(20, 3)
    nest = (x.cos(), (x.sin(), x), x.sin())
    assert torch.equal(paceline.data_parallel(Model(), nest, CPUS), x.sin())


def test_data_parallel_nested_output() -> None:
    def compute(x: torch.Tensor) -> Any:
        return [x, (x.sin(), x.cos(), [x.add(1)]), x, OrderedDict(a=x, b=[x.sin()])]

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return compute(x)

    x = torch.randn(2, 2)
    found = paceline.data_parallel(Model(), x, CPUS)
    torch.testing.assert_close(found, compute(x))
    kinds = [type(found), type(found[1]), type(found[1][2]), type(found[3]), type(found[3]["b"])]
    assert kinds == [list, tuple, list, OrderedDict, list]


def test_data_parallel_no_grad() -> None:
    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert not torch.is_grad_enabled()
            return x

    x = torch.randn(20, 10)
    with torch.no_grad():
        paceline.data_parallel(Layer(), x, CPUS)
    with pytest.raises(AssertionError):
        paceline.data_parallel(Layer(), x, CPUS)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_data_parallel_rnn(kind: type[nn.RNNBase]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = kind(30, 64, 2, batch_first=True, bidirectional=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.rnn.flatten_parameters()
            output: torch.Tensor = self.rnn(x)[0]
            return output

    model = Model()
    with torch.no_grad():
        paceline.DataParallel(model, CPUS)(torch.rand(2, 4, 30))
    flat = list(model.rnn._flat_weights)
    assert_same_as_plain(model, torch.randn(4, 4, 30), steps=2)
    assert all(a is b for a, b in zip(model.rnn._flat_weights, flat, strict=True))
    replicas = paceline.replicate(model, CPUS)
    for replica in replicas:
        names = replica.rnn._flat_weights_names
        assert all(
            getattr(replica.rnn, name) is weight
            for name, weight in zip(names, replica.rnn._flat_weights, strict=True)
        )


def test_data_parallel_small_back() -> None:
    layer, x = nn.Linear(10, 5), torch.randn(20, 10)
    torch.testing.assert_close(paceline.data_parallel(layer, x, CPUS), layer(x))


def test_data_parallel_sparse() -> None:
    layer = nn.Embedding(10, 5, sparse=True)
    x = torch.randint(10, (20, 5))
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    expected, layer.weight.grad = layer.weight.grad, None
    paceline.data_parallel(layer, x, CPUS).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.is_sparse
    torch.testing.assert_close(layer.weight.grad.coalesce(), expected.coalesce())


def test_data_parallel_module_parameter_list_and_dict() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.ParameterList([torch.randn(4), torch.randn(4)])
            self.named = nn.ParameterDict({"a": torch.randn(4), "b": torch.randn(4)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total = x + sum(self.rows) + sum(self.named.values())
            assert len(self.rows) == len(self.named) == 2
            assert list(self.named.keys()) == ["a", "b"]
            return total * self.rows[0] * self.named["b"]

    assert_same_as_plain(Model(), torch.randn(6, 4))


def test_data_parallel() -> None:
    layer, x = nn.Linear(10, 5), torch.randn(20, 10)
    expected = run(layer, x)
    found = run(paceline.DataParallel(layer, CPUS), x)
    torch.testing.assert_close(found, expected)
    assert found[0].device == torch.device("cpu")
