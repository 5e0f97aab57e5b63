"""One test for each in torch's test_data_parallel.py, under its name, on CPU replicas."""

from __future__ import annotations

import copy
import gc
import io
from collections import OrderedDict
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
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


def test_autocast() -> None:
    class Model(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(input)

    model = paceline.DataParallel(Model(8, 8), CPUS)
    assert model(torch.randn(8, 8)).dtype is torch.bfloat16


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


def test_gather_cpu() -> None:
    inputs = [torch.randn(2, 4, dtype=torch.double, requires_grad=True) for _ in range(2)]
    result = paceline.gather(inputs, "cpu")
    assert torch.equal(result, torch.cat(inputs))
    grad = torch.randn(4, 4, dtype=torch.double)
    result.backward(grad)
    assert torch.equal(torch.cat([t.grad for t in inputs if t.grad is not None]), grad)
    assert torch.autograd.gradcheck(lambda *t: paceline.gather(t, "cpu"), inputs)
    assert torch.autograd.gradgradcheck(lambda *t: paceline.gather(t, "cpu"), inputs)
    scalars = [torch.randn((), requires_grad=True) for _ in range(2)]
    with pytest.warns(UserWarning, match="each of 2 replicas"):
        result = paceline.gather(scalars, "cpu")
    assert torch.equal(result, torch.stack(scalars))
    with pytest.warns(FutureWarning, match='write "cpu"'):
        assert paceline.gather(inputs, -1).shape == (4, 4)


def test_gather_different_len_dicts() -> None:
    inputs = (
        {"a": torch.randn(1, 2)},
        {"b": torch.randn(1, 2), "a": torch.randn(1, 2)},
    )
    with pytest.raises(ValueError, match=r"1 keys \['a'\], replica 1.* 2 keys \['b', 'a'\]"):
        paceline.gather(inputs, target_device="cpu")


def test_parallel_apply() -> None:
    layers = (nn.Linear(10, 5), nn.Linear(10, 5))
    x, y = torch.randn(2, 10), torch.randn(2, 10)
    expected = [layers[0](x), layers[1](y)]
    for inputs in (((x,), (y,)), (x, y), ([x], [y])):
        torch.testing.assert_close(paceline.parallel_apply(layers, inputs, None), expected)
    functions = (torch.sin, torch.cos)
    assert torch.equal(paceline.parallel_apply(functions, (x, y))[1], y.cos())


def test_parallel_apply_autocast() -> None:
    layers = (nn.Linear(10, 5), nn.Linear(10, 5))
    x, y = torch.randn(2, 10), torch.randn(2, 10)
    with torch.autocast("cpu", torch.bfloat16):
        expected = [layers[0](x), layers[1](y)]
        found = paceline.parallel_apply(layers, (x, y))
    assert found[0].dtype is torch.bfloat16
    torch.testing.assert_close(found, expected)


def test_parallel_apply_passes_exception() -> None:
    class Model(nn.Module):
        def forward(self, *_: Any) -> Any:
            return {}["wonderful"]

    with pytest.raises(KeyError, match="wonderful") as caught:
        paceline.parallel_apply((Model(), Model()), (None, None))
    assert str(caught.value) == "Caught KeyError in replica 0 on device cpu.\nwonderful"
    assert "replica 0 of 2, on cpu" in caught.value.__notes__[0]
    assert "Replica 1 failed too: KeyError" in caught.value.__notes__[0]
    assert caught.traceback[-1].name == "forward"


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


def test_replicate() -> None:
    module, x = nn.Linear(10, 5), torch.randn(2, 10)
    for devices in (("cpu", "cpu"), ["cpu", "cpu"]):
        for replica in paceline.replicate(module, devices):
            assert replica is not module
            assert not list(replica.parameters())
            assert torch.equal(replica(x), module(x))


def test_replicate_buffers() -> None:
    net = nn.Module()
    net.bn = nn.BatchNorm2d(10)
    for replica in paceline.replicate(net, ["cpu", "meta"])[1:]:
        kinds = {buffer.device.type for buffer in replica.bn.buffers()}
        assert kinds == {"meta"}
    first, second = paceline.replicate(net, CPUS)
    assert first.bn.running_mean is net.bn.running_mean
    assert second.bn.running_mean.data_ptr() != net.bn.running_mean.data_ptr()


@pytest.mark.parametrize("detach", [False, True])
def test_save_replica_module(detach: bool) -> None:
    module = nn.Linear(8, 8)
    data = io.BytesIO()
    torch.save(paceline.replicate(module, CPUS, detach=detach), data)
    data.seek(0)
    loaded = torch.load(data, weights_only=False)
    x = torch.randn(2, 8)
    assert torch.equal(loaded[1](x), module(x))


def test_scatter_cpu() -> None:
    x = torch.randn(4, 4, dtype=torch.double, requires_grad=True)
    result = paceline.scatter(x, CPUS)
    assert isinstance(result, tuple)
    assert torch.equal(result[0], x[:2])
    assert torch.equal(result[1], x[2:])
    result[0].backward(torch.full((2, 4), 2.0, dtype=torch.double))
    assert x.grad is not None
    assert torch.equal(x.grad[:2], torch.full((2, 4), 2.0, dtype=torch.double))
    assert not x.grad[2:].any()
    assert torch.autograd.gradcheck(lambda y: paceline.scatter(y, CPUS), (x,))
    assert torch.autograd.gradgradcheck(lambda y: paceline.scatter(y, CPUS), (x,))


FORMATS = (torch.contiguous_format, torch.channels_last)


@pytest.mark.parametrize(
    ("formats", "dtypes"),
    list(product(product(FORMATS, FORMATS), product((torch.float32, torch.bfloat16), repeat=2))),
)
def test_strided_grad_layout(formats: Any, dtypes: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = ((8, 16), (16, 8))
            self.layers = nn.ModuleList(
                nn.Conv2d(*size, 2).to(memory_format=form, dtype=dtype)
                for size, form, dtype in zip(sizes, formats, dtypes, strict=True)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer, dtype in zip(self.layers, dtypes, strict=True):
                x = layer(x.to(dtype))
            return x

    plain = Net()
    parallel = paceline.DataParallel(copy.deepcopy(plain), CPUS)
    x, target = torch.randn(8, 8, 6, 6), torch.randn(8, 8, 4, 4)
    tolerance = 5e-2 if torch.bfloat16 in dtypes else 1e-5
    for _ in range(2):  # without gradients, then with zeroed ones
        for model in (plain, parallel):
            F.mse_loss(model(x).float(), target).backward()
        for layer, own, form in zip(plain.layers, parallel.module.layers, formats, strict=True):
            assert layer.weight.grad is not None
            assert own.weight.grad is not None
            assert own.weight.grad.stride() == layer.weight.grad.stride()
            assert own.weight.grad.is_contiguous(memory_format=form)
            torch.testing.assert_close(
                own.weight.grad, layer.weight.grad, rtol=tolerance, atol=tolerance
            )
        plain.zero_grad(set_to_none=False)
        parallel.zero_grad(set_to_none=False)


def test_zero_grad() -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with pytest.warns(UserWarning, match="has no effect"):
                self.zero_grad()
            return x

    # One replica at a time: pytest.warns, like all that catches warnings, is for one thread.
    (replica, _) = paceline.replicate(Net(), CPUS)
    paceline.parallel_apply([replica], [torch.rand(4, 3)], devices=["cpu"])


def test_gradient_penalty() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(6, 4, requires_grad=True)

    def penalty(model: nn.Module) -> list[torch.Tensor]:
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (slope.norm(dim=1) - 1).pow(2).mean().backward()
        found = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        net.zero_grad()
        return found

    torch.testing.assert_close(penalty(paceline.DataParallel(net, CPUS)), penalty(net))


def test_data_parallel() -> None:
    layer, x = nn.Linear(10, 5), torch.randn(20, 10)
    expected = run(layer, x)
    found = run(paceline.DataParallel(layer, CPUS), x)
    torch.testing.assert_close(found, expected)
    assert found[0].device == torch.device("cpu")
