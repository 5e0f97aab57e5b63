"""torch.compile around and inside the wrapper gives the numbers of the plain wrapper."""

from __future__ import annotations

import shutil
import warnings

import pytest
import torch
from torch import nn

from paceline import DistributedDataParallel as DDP
from paceline.testing import run_ranks
from tests.ddp.compare import assert_close, batch, gradients
from tests.ddp.models import mlp

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="torch.compile needs a C++ compiler: neither g++ nor clang++ is installed",
)


def losses(model: nn.Module) -> list[float]:
    values = []
    for step in range(3):
        model.zero_grad()
        value = model(batch(step)).square().mean()
        value.backward()
        values.append(value.item())
    return values


@needs_compiler
@pytest.mark.timeout(300)
def test_compiled_equals_plain() -> None:
    def on_rank() -> None:
        warnings.simplefilter("ignore")  # the numbers count here; warnings are the other test's
        plain = DDP(mlp(4))
        expected = losses(plain)
        around = DDP(mlp(4))
        torch.testing.assert_close(losses(torch.compile(around)), expected)
        assert_close(gradients(around), gradients(plain), "compile(ddp):")
        inside = mlp(4)
        torch.testing.assert_close(losses(DDP(torch.compile(inside))), expected)
        assert_close(gradients(inside), gradients(plain), "ddp(compile):")

    run_ranks(2, on_rank, timeout_s=240)


@pytest.mark.timeout(200)
def test_traced_without_a_warning() -> None:
    """Dynamo compiles the module, and leaves the wrapper alone: as with torch's, no warning."""

    def on_rank() -> None:
        plain = DDP(mlp(4))
        expected = losses(plain)
        around = DDP(mlp(4))
        torch.testing.assert_close(losses(torch.compile(around, backend="aot_eager")), expected)
        assert_close(gradients(around), gradients(plain))

    run_ranks(2, on_rank, timeout_s=150)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> torch.Tensor:
    """A whole step; every second one accumulates first."""
    optimizer.zero_grad()
    if number % 2:
        with model.no_sync():
            model(batch(number + 50)).square().mean().backward()
    value = model(batch(number)).square().mean()
    value.backward()
    optimizer.step()
    return value.detach()


def compare_whole_steps() -> None:
    warnings.simplefilter("ignore")  # torch's own, about graph breaks
    plain, ddp = DDP(mlp(4)), DDP(mlp(4))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, ddp)]
    compiled = torch.compile(train_step, backend="eager")
    for number in range(6):
        expected = train_step(plain, optimizers[0], number)
        with torch._dynamo.config.patch(compiled_autograd=number >= 3):
            found = compiled(ddp, optimizers[1], number)
        torch.testing.assert_close(found, expected)
        assert_close(gradients(ddp), gradients(plain))


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_whole_step_in_one_compiled_function() -> None:
    """The backward runs under the compiler's eyes, and our hooks in it."""
    run_ranks(2, compare_whole_steps, timeout_s=240)
