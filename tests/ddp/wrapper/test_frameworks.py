"""What frameworks do to a wrapper, done as they do it: the gradients are those of torch's DDP.

Each scenario follows the code of one framework, call by call. The names themselves are listed in
``test_framework_names.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from paceline.testing import run_ranks
from tests.ddp.compare import (
    assert_close,
    assert_identical,
    assert_same_on_all_ranks,
    batch,
    gradients,
    pair,
)
from tests.ddp.models import Branches, mlp, seeded

STEPS = 3


class Checkpointed(nn.Module):
    """Layers, of which some are run again in a backward inside of the backward."""

    def __init__(self, *which: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.which = which

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad_()
        for at, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=True) if at in self.which else layer(x)
        return x


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: mlp(4),
    "checkpoint inside": lambda: Checkpointed(1),
    "checkpoint at the end": lambda: Checkpointed(1, 2),
    "checkpoint everywhere": lambda: Checkpointed(0, 1, 2),
}


def loss(model: nn.Module, number: int) -> Tensor:
    return model(batch(number)).square().mean()


# --- Accelerate: Accelerator.no_sync and Accelerator.trigger_sync_in_backward -------------------


@contextlib.contextmanager
def trigger_sync_in_backward(model: TorchDDP) -> Iterator[None]:
    before = model.require_backward_grad_sync, model.require_forward_param_sync
    model.require_backward_grad_sync = model.require_forward_param_sync = True
    model.reducer.prepare_for_backward([])
    try:
        yield
    finally:
        model.require_backward_grad_sync, model.require_forward_param_sync = before


def accelerate_step(model: TorchDDP, step: int) -> None:
    with model.no_sync():
        first = loss(model, 10 * step)
        second = loss(model, 10 * step + 1)
    first.backward()
    with trigger_sync_in_backward(model):
        second.backward()


# --- Lightning: manual optimisation -------------------------------------------------------------


class Lit(nn.Module):
    """A LightningModule: its training step, with backwards in it, is run as the forward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, training_step: Callable[[nn.Module], Tensor]) -> Tensor:
        return training_step(self.inner)


def redirected(model: TorchDDP, training_step: Callable[[nn.Module], Tensor]) -> None:
    """What ``_DDPForwardRedirection`` does: the forward itself synchronises nothing."""

    def leave(*_: Any) -> None:
        model.require_backward_grad_sync = False

    handle = model.module.register_forward_hook(leave)
    model(training_step)
    handle.remove()
    model.require_backward_grad_sync = True


def manual_backward(model: TorchDDP, value: Tensor) -> None:
    """What ``DDPStrategy.pre_backward`` and ``post_backward`` do around it."""
    model.require_forward_param_sync = True
    searches = model.find_unused_parameters and not model.static_graph
    model.reducer._rebuild_buckets()
    model.reducer.prepare_for_backward([value] if searches else [])
    value.backward()
    if model.static_graph and not getattr(model, "_test_delay_done", False):
        model.reducer._delay_all_reduce()
        model._test_delay_done = True


def lightning_step(model: TorchDDP, step: int) -> None:
    def training_step(inner: nn.Module) -> Tensor:
        for number in range(2):
            value = loss(inner, 10 * step + number)
            manual_backward(model, value)
        return value.detach()

    redirected(model, training_step)


def lightning_plain_step(model: TorchDDP, step: int) -> None:
    def training_step(inner: nn.Module) -> Tensor:
        value = loss(inner, step)
        manual_backward(model, value)
        return value.detach()

    redirected(model, training_step)


def lightning_gan_step(model: TorchDDP, step: int) -> None:
    """Two optimizers, each of which trains its part: two backwards, each of a part of the graph."""

    def training_step(inner: nn.Module) -> Tensor:
        for number, names in enumerate(["ab", "bc"]):
            value = inner(batch(10 * step + number), names).square().mean()
            manual_backward(model, value)
        return value.detach()

    redirected(model, training_step)


# --- how they are compared ----------------------------------------------------------------------


def compare(
    build: Callable[[], nn.Module],
    run: Callable[[TorchDDP, int], None],
    options: dict[str, Any],
    own: dict[str, Any],
) -> None:
    ours, theirs = pair(build(), **options)
    ours = type(ours)(ours.module, **options, **own) if own else ours
    for step in range(STEPS):
        for model in (ours, theirs):
            model.zero_grad()
            run(model, step)
        assert_identical(gradients(ours), gradients(theirs), f"step {step}:")
        assert_same_on_all_ranks(gradients(ours))


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("run", [accelerate_step, lightning_step])
def test_gradients_are_those_of_torch(run: Any, model: str, transport: str) -> None:
    build = MODELS[model] if run is accelerate_step else lambda: Lit(MODELS[model]())
    run_ranks(2, compare, build, run, {}, {"transport": transport})


@pytest.mark.parametrize("model", MODELS)
def test_lightning_with_a_static_graph(model: str) -> None:
    def build() -> nn.Module:
        return Lit(MODELS[model]())

    run_ranks(2, compare, build, lightning_plain_step, {"static_graph": True}, {})


def test_lightning_with_two_optimizers() -> None:
    options = {"find_unused_parameters": True}
    run_ranks(2, compare, lambda: Lit(seeded(Branches)), lightning_gan_step, options, {})


def test_accelerate_with_unused_parameters() -> None:
    """torch marks every parameter as unused here, and then fails; ours asks the engine."""

    def on_rank() -> None:
        ours, theirs = pair(mlp(4), find_unused_parameters=True)
        plain = pair(mlp(4))[1]
        with pytest.raises(RuntimeError, match="mark a variable ready only once"):
            accelerate_step(theirs, 0)
        accelerate_step(ours, 0)
        accelerate_step(plain, 0)
        assert_identical(gradients(ours), gradients(plain))

    run_ranks(2, on_rank)


# --- torch.distributed.pipelining ---------------------------------------------------------------


def pipeline(model: TorchDDP, alone: dist.ProcessGroup) -> ScheduleGPipe:
    example = torch.empty(2, 4)
    stage = PipelineStage(model, 0, 1, torch.device("cpu"), example, example, group=alone)
    return ScheduleGPipe(stage, n_microbatches=4, loss_fn=lambda y, t: (y - t).square().mean())


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("model", ["mlp", "checkpoint at the end"])
def test_pipelining(model: str, transport: str) -> None:
    """One stage on each rank, wrapped: the schedule's last backward synchronises."""

    def on_rank() -> None:
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        ours, theirs = pair(MODELS[model]())
        ours = type(ours)(ours.module, transport=transport)
        schedules = [(each, pipeline(each, groups[dist.get_rank()])) for each in (ours, theirs)]
        for step in range(STEPS):
            for each, schedule in schedules:
                each.zero_grad()
                schedule.step(batch(step, rows=8), target=batch(step + 50, rows=8))
            assert_close(gradients(ours), gradients(theirs))
            assert_same_on_all_ranks(gradients(ours))

    run_ranks(2, on_rank)
