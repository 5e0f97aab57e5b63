"""The wrapper: equal to the plain module, whatever the module is made of."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import paceline
from paceline.dp.devices import accelerator_type
from tests.dp.compare import CPUS, assert_same_as_plain, run

NO_ACCELERATOR = pytest.mark.skipif(accelerator_type() is not None, reason="has an accelerator")


def old_style(norm: Any, layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        made: nn.Module = norm(layer)
    return made


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"a": nn.Linear(6, 2), "b": nn.Linear(6, 3)})

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: head(x) for name, head in self.heads.items()}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(self.second(x).tanh()) @ self.first.weight


class Doubled(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return 2 * w


def parametrized() -> nn.Module:
    layer = nn.Linear(6, 6)
    parametrize.register_parametrization(layer, "weight", Doubled())
    return layer


MODELS: dict[str, Any] = {
    "mlp": lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 6)),
    "relu in place": lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6)),
    "no parameters": lambda: nn.Tanh(),
    "frozen": lambda: nn.Sequential(nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 6)),
    "tied": Tied,
    "dict out": Heads,
    "attention": lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True),
    "parametrized": parametrized,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(6, 6)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(6, 6)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(6, 6)),
    "old weight norm": lambda: old_style(nn.utils.weight_norm, nn.Linear(6, 6)),
    "old spectral norm": lambda: old_style(nn.utils.spectral_norm, nn.Linear(6, 6)),
    "batch norm, eval": lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).eval(),
    "layer norm": lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_equals_the_plain_module(name: str, replicas: int) -> None:
    torch.manual_seed(0)
    module = MODELS[name]()
    torch.manual_seed(0)
    plain = MODELS[name]()
    x = torch.randn(7, 5, 6) if name == "attention" else torch.randn(7, 6)
    if name == "relu in place":
        x.clamp_(min=0)  # else the first of the two would change what the second gets
    if name == "no parameters":
        x.requires_grad_()
    assert_same_as_plain(module, x, devices=["cpu"] * replicas, steps=3, plain=plain)


def test_bits_are_those_of_the_plain_module_on_each_piece() -> None:
    """Where the arithmetic is the same, so are the bits: forward on pieces, gradients added."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8))
    x = torch.randn(24, 32)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = torch.cat([model(piece) for piece in x.chunk(2)])
        expected.sum().backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        found = paceline.DataParallel(model, CPUS)(x)
        found.sum().backward()
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found, expected)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_gradients_accumulate_in_the_tensor_that_is_there() -> None:
    model = nn.Linear(4, 4)
    parallel = paceline.DataParallel(model, CPUS)
    x = torch.randn(6, 4)
    parallel(x).sum().backward()
    home, once = model.weight.grad, model.weight.grad.clone()
    parallel(x).sum().backward()
    assert model.weight.grad is home
    torch.testing.assert_close(home, 2 * once)


def test_a_batch_smaller_than_the_number_of_devices() -> None:
    for rows in (0, 1, 2, 3):
        assert_same_as_plain(nn.Linear(3, 2), torch.randn(rows, 3), devices=["cpu"] * 4)


def test_inputs_that_need_gradients() -> None:
    x = torch.randn(6, 4, requires_grad=True)
    assert_same_as_plain(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), x)


def test_inference_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with torch.inference_mode():
        out = paceline.DataParallel(model.eval(), CPUS)(torch.randn(6, 4))
        assert out.is_inference()
    with torch.inference_mode():
        born = nn.Linear(4, 4)
        assert paceline.DataParallel(born, CPUS)(torch.randn(6, 4)).shape == (6, 4)


def test_autocast_gives_the_same_gradients_every_time() -> None:
    """No cast of a parameter is shared between threads by luck."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    parallel = paceline.DataParallel(model, CPUS)
    x = torch.randn(8, 16)
    found = []
    for _ in range(20):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(run(parallel, x))
    for output, gradients in found[1:]:
        assert torch.equal(output, found[0][0])
        for mine, first in zip(gradients, found[0][1], strict=True):
            assert torch.equal(mine, first)


@NO_ACCELERATOR
def test_without_accelerators_torchs_arguments_run_the_module_as_it_is() -> None:
    model = nn.Linear(3, 3)
    x = torch.randn(4, 3)
    parallel = paceline.DataParallel(model)
    assert parallel.device_ids == []
    assert torch.equal(parallel(x), model(x))
    with pytest.warns(UserWarning, match=r"device_ids=\[0, 1\].*none"):
        assert paceline.DataParallel(model, [0, 1]).device_ids == []
    assert torch.equal(paceline.DataParallel(model, [])(x), model(x))
    for ids in (None, []):
        with pytest.raises(RuntimeError, match="no available devices were found"):
            paceline.data_parallel(model, x, ids)


@pytest.mark.may_leave("environ")  # meta tensors import the compiler
def test_one_device_moves_the_module_there() -> None:
    parallel = paceline.DataParallel(nn.Linear(3, 3), ["meta"])
    assert parallel.module.weight.device.type == "meta"
    assert parallel(torch.randn(4, 3)).device.type == "meta"


@pytest.mark.may_leave("environ")
def test_outputs_go_to_the_output_device() -> None:
    parallel = paceline.DataParallel(nn.Linear(3, 3), CPUS, output_device="meta")
    assert parallel(torch.randn(4, 3)).device.type == "meta"


def test_attributes_and_isinstance() -> None:
    parallel = paceline.DataParallel(nn.Linear(3, 3), ["cpu", torch.device("cpu:0")], dim=1)
    assert isinstance(parallel, nn.DataParallel)
    cpu = torch.device("cpu")
    assert parallel.device_ids == [cpu, cpu]
    assert (parallel.output_device, parallel.src_device_obj, parallel.dim) == (cpu, cpu, 1)
    assert list(parallel.state_dict()) == ["module.weight", "module.bias"]


def test_dim() -> None:
    class Rows(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.cumsum(0)

    x = torch.randn(5, 6)
    assert torch.equal(paceline.DataParallel(Rows(), CPUS, dim=1)(x), x.cumsum(0))


def test_parts_may_be_overridden() -> None:
    class Mine(paceline.DataParallel[nn.Module]):
        def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
            assert len(device_ids) == 2
            return ((inputs[0],), (inputs[0] + 1,)), ({}, {})

        def gather(self, outputs: Any, output_device: Any) -> Any:
            return list(outputs)

    assert Mine(nn.Identity(), CPUS)(torch.zeros(1)) == [torch.zeros(1), torch.ones(1)]


def test_pickles_and_copies() -> None:
    parallel = paceline.DataParallel(nn.Linear(3, 3), CPUS)
    x = torch.randn(4, 3)
    expected = parallel(x)
    data = io.BytesIO()
    torch.save(parallel, data)
    data.seek(0)
    for other in (torch.load(data, weights_only=False), copy.deepcopy(parallel)):
        assert torch.equal(other(x), expected)


@pytest.mark.may_leave("environ", "threads")
def test_compile() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = torch.randn(6, 4)
    expected = model(x)
    for compiled in (
        torch.compile(paceline.DataParallel(model, CPUS), backend="eager"),
        paceline.DataParallel(torch.compile(model, backend="eager"), CPUS),
    ):
        for _ in range(2):
            torch.testing.assert_close(compiled(x), expected)


def test_profiler_sees_the_forward() -> None:
    with torch.profiler.profile() as profile:
        paceline.DataParallel(nn.Linear(3, 3), CPUS)(torch.randn(4, 3))
    assert "DataParallel.forward" in {event.key for event in profile.key_averages()}


def test_training_converges_to_the_same_weights() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    module = copy.deepcopy(plain)
    parallel = paceline.DataParallel(module, CPUS)
    x, y = torch.randn(32, 6), torch.randn(32, 1)
    for _ in range(20):
        for model in (plain, parallel):
            model.zero_grad()
            (model(x) - y).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
    torch.testing.assert_close(dict(module.state_dict()), dict(plain.state_dict()))


def test_scalar_losses_become_a_vector_with_a_warning() -> None:
    class Loss(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum()

    with pytest.warns(UserWarning, match="scalars"):
        found = paceline.DataParallel(Loss(), CPUS)(torch.ones(4))
    assert found.tolist() == [2, 2]


@pytest.mark.parametrize("device", ["cuda:0", "xpu", "cuda:99"])
def test_a_device_that_is_not_there(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.dp.devices.all_accelerators", list)
    with pytest.raises(paceline.errors.PlacementError) as error:
        paceline.DataParallel(nn.Linear(2, 2), device_ids=["cpu", device])
    assert f"no device {device} here" in str(error.value)
    assert 'device_ids=["cpu", "cpu"]' in str(error.value)
