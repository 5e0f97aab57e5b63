"""Accelerate with our Accelerator, beside its own on gloo."""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader

import paceline
from paceline.testing import run_ranks
from tests.integrations.table import (
    RANKS,
    TABLE_MARKS,
    Curve,
    Side,
    Table,
    check,
    check_backends,
    torchrun_variables,
)
from tests.integrations.workload import Averages, dataset, make
from tests.required import needs

pytestmark = [needs("accelerate"), *TABLE_MARKS]

table = Table(on_gloo_only=["compiled"])


def start(side: Side, **options: Any) -> Any:
    import accelerate
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import set_seed

    from paceline.integrations.accelerate import Accelerator

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    set_seed(3)
    return side.choose(accelerate.Accelerator, Accelerator)(cpu=True, **options)


def prepared(accelerator: Any, module: torch.nn.Module, samples: int = 48) -> Any:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    loader = DataLoader(dataset(samples), batch_size=4, shuffle=True)
    return accelerator.prepare(module, optimizer, loader)


def step(accelerator: Any, model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    loss = F.cross_entropy(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def train(accelerator: Any, module: torch.nn.Module, epochs: int = 2) -> Curve:
    model, optimizer, loader = prepared(accelerator, module)
    batches = [batch for _ in range(epochs) for batch in loader]
    return Curve(model, [step(accelerator, model, optimizer, x, y) for x, y in batches])


def ddp_options(**options: Any) -> list[Any]:
    from accelerate.utils import DistributedDataParallelKwargs

    return [DistributedDataParallelKwargs(**options)]


@table
def plain(side: Side) -> Curve:
    return train(start(side), make())


@table
def with_torch_patched(side: Side) -> Curve:
    """Accelerate's own class on gloo; it finds our wrapper under torch's name."""
    theirs = Side(False, side.folder)
    with paceline.patch_torch() if side.is_ours else contextlib.nullcontext():
        return train(start(theirs), make())


@table
def accumulate(side: Side) -> Curve:
    accelerator = start(side, gradient_accumulation_steps=2)
    model, optimizer, loader = prepared(accelerator, make())
    losses = []
    for x, y in loader:
        with accelerator.accumulate(model):
            losses.append(step(accelerator, model, optimizer, x, y))
    return Curve(model, losses)


@table
def no_sync(side: Side) -> Curve:
    accelerator = start(side)
    model, optimizer, loader = prepared(accelerator, make())
    losses = []
    for number, (x, y) in enumerate(loader):
        if number % 2 == 0:
            with accelerator.no_sync(model):
                losses.append(F.cross_entropy(model(x), y))
                accelerator.backward(losses[-1])
        else:
            losses.append(step(accelerator, model, optimizer, x, y))
    return Curve(model, losses)


@table
def trigger_sync_in_backward(side: Side) -> Curve:
    accelerator = start(side)
    model, optimizer, loader = prepared(accelerator, make())
    losses = []
    batches = list(loader)
    for (x, y), (u, v) in zip(batches[::2], batches[1::2], strict=True):
        with accelerator.no_sync(model):
            first = F.cross_entropy(model(x), y)
            second = F.cross_entropy(model(u), v)
        accelerator.backward(first)
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(second)
        optimizer.step()
        optimizer.zero_grad()
        losses += [first, second]
    return Curve(model, losses)


@table
def clip_gradients(side: Side) -> Curve:
    accelerator = start(side)
    model, optimizer, loader = prepared(accelerator, make())
    losses, norms = [], []
    for number, (x, y) in enumerate(loader):
        losses.append(F.cross_entropy(model(x), y))
        accelerator.backward(losses[-1])
        if number % 2:
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.1))
        else:
            accelerator.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return Curve(model, losses, norms)


@table
def gather_for_metrics(side: Side) -> Curve:
    """45 samples: the last batch is padded, and gather_for_metrics takes that out again."""
    accelerator = start(side)
    model, optimizer, loader = prepared(accelerator, make(), samples=45)
    losses, seen = [], []
    for x, y in loader:
        losses.append(step(accelerator, model, optimizer, x, y))
        seen.append(accelerator.gather_for_metrics(y).double())
    gathered = accelerator.gather(losses[-1].detach())
    reduced = accelerator.reduce(losses[-1].detach(), reduction="mean")
    assert sum(len(part) for part in seen) == 45
    return Curve(model, losses, [*seen, gathered, reduced])


@table
def save_and_resume(side: Side) -> Curve:
    accelerator = start(side)
    model, optimizer, loader = prepared(accelerator, make())
    losses = [step(accelerator, model, optimizer, x, y) for x, y in loader]
    accelerator.save_state(side.folder)
    saved = [p.detach().clone() for p in model.parameters()]
    losses += [step(accelerator, model, optimizer, x, y) for x, y in loader]
    accelerator.load_state(side.folder)
    assert all(map(torch.equal, saved, model.parameters()))
    losses += [step(accelerator, model, optimizer, x, y) for x, y in loader]
    plain_model = accelerator.unwrap_model(model)
    assert list(accelerator.get_state_dict(model)) == list(plain_model.state_dict())
    assert os.path.exists(os.path.join(side.folder, "model.safetensors"))
    return Curve(model, losses)


@table
def find_unused_parameters(side: Side) -> Curve:
    handlers = ddp_options(find_unused_parameters=True)
    return train(start(side, kwargs_handlers=handlers), make(branch=True))


@table
def static_graph_and_views(side: Side) -> Curve:
    handlers = ddp_options(static_graph=True, gradient_as_bucket_view=True)
    return train(start(side, kwargs_handlers=handlers), make())


@table
def communication_hook(side: Side) -> Curve:
    from accelerate.utils import DDPCommunicationHookType

    handlers = ddp_options(comm_hook=DDPCommunicationHookType.FP16)
    return train(start(side, kwargs_handlers=handlers), make())


@table
def gradient_checkpointing(side: Side) -> Curve:
    return train(start(side), make(checkpointed=True))


@table
def compiled(side: Side) -> Curve:
    torch._dynamo.reset()
    return train(start(side, dynamo_backend="aot_eager"), make(), epochs=1)


@table
def bf16(side: Side) -> Curve:
    return train(start(side, mixed_precision="bf16"), make())


@table
def averages_ema_and_swa(side: Side) -> Curve:
    accelerator = start(side)
    model, optimizer, loader = prepared(accelerator, make())
    inner = accelerator.unwrap_model(model)
    averages = Averages(inner)
    losses = []
    for x, y in loader:
        losses.append(step(accelerator, model, optimizer, x, y))
        averages.update()
    return Curve(model, losses, averages.parameters())


@functools.cache
def tracker_class() -> Any:
    from accelerate.tracking import GeneralTracker

    class Tracker(GeneralTracker):  # type: ignore[misc]
        """Keeps what is logged; Accelerate asks it on the first rank only."""

        name = "kept"
        requires_logging_directory = False
        tracker: Any = None

        def __init__(self) -> None:
            super().__init__()
            self.logged: list[float] = []

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            self.logged.append(values["lr"])

        def log(self, values: dict[str, float], step: int | None = None, **_: Any) -> None:
            self.logged += [float(step or 0), values["loss"]]

    return Tracker


@table
def scheduler_and_tracker(side: Side) -> Curve:
    tracker = tracker_class()()
    accelerator = start(side, log_with=tracker)
    accelerator.init_trackers("run", config={"lr": 0.01})
    model, optimizer, loader = prepared(accelerator, make())
    inner = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, step_size=2, gamma=0.5)
    scheduler = accelerator.prepare(inner)
    losses, rates = [], []
    for number, (x, y) in enumerate(loader):
        losses.append(step(accelerator, model, optimizer, x, y))
        accelerator.log({"loss": losses[-1].item()}, step=number)
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    assert len(tracker.logged) == (1 + 2 * len(losses) if accelerator.is_main_process else 0)
    return Curve(model, losses, rates + tracker.logged)


@table
def torchmetrics(side: Side) -> Curve:
    from torchmetrics.classification import MulticlassAccuracy

    accelerator = start(side)
    model, optimizer, loader = prepared(accelerator, make())
    accuracy = MulticlassAccuracy(num_classes=3)
    losses = []
    for x, y in loader:
        accuracy.update(model(x), y)
        losses.append(step(accelerator, model, optimizer, x, y))
    return Curve(model, losses, [accuracy.compute()])


@table
def lora(side: Side) -> Curve:
    from peft import LoraConfig, get_peft_model

    accelerator = start(side)
    module = get_peft_model(make(), LoraConfig(r=2, target_modules=["last", "middle.0"]))
    return train(accelerator, module)


@pytest.fixture(scope="module")
def told() -> dict[str, list[Any]]:
    return table.run()


@pytest.mark.parametrize("name", table.features)
def test_feature(name: str, told: dict[str, list[Any]]) -> None:
    check(told[name])


def test_on_both_backends(told: dict[str, list[Any]]) -> None:
    check_backends(table, told)


def own() -> dict[str, Any]:
    """What Accelerate cannot do on CPUs: our group, uneven inputs."""
    ours = Side(True, "")
    accelerator = start(ours, wrapper_options={"nonfinite": "raise"})
    told: dict[str, Any] = {"backend": dist.get_backend(), "state": accelerator.state.backend}
    model, optimizer, loader = prepared(accelerator, make().eval(), samples=20)
    with accelerator.join_uneven_inputs([model], even_batches=False):
        told["batches"] = sum(1 for x, y in loader if step(accelerator, model, optimizer, x, y) > 0)
    told["weights"] = [p.detach().sum().item() for p in model.parameters()]
    try:
        accelerator.backward(model(torch.full((4, 12), float("nan"))).sum())
    except ArithmeticError as error:
        told["error"] = type(error).__name__
    accelerator.end_training()
    return told


def test_own() -> None:
    first, second = run_ranks(RANKS, own, init=False, env=torchrun_variables(), timeout_s=240)
    assert first["backend"] == first["state"] == "paceline"
    assert (first["batches"], second["batches"]) == (3, 2)
    assert first["weights"] == second["weights"]
    assert first["error"] == second["error"] == "NonFiniteGradientError"
