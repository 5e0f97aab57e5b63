"""One test for each of the functions beside ``DataParallel`` in torch's test_data_parallel.py."""

from __future__ import annotations

import copy
import io
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline
from tests.dp.compare import CPUS


def test_autocast() -> None:
    class Model(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(input)

    model = paceline.DataParallel(Model(8, 8), CPUS)
    assert model(torch.randn(8, 8)).dtype is torch.bfloat16


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
