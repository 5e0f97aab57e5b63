"""Lightning Fabric with ``strategy="paceline"``, beside its own DDP on gloo."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from tests.integrations.table import (
    TABLE_MARKS,
    Curve,
    Side,
    Table,
    check,
    check_backends,
)
from tests.integrations.workload import Averages, dataset, make
from tests.required import needs

pytestmark = [needs("lightning"), *TABLE_MARKS]

table = Table(on_gloo_only=["compiled", "compiled_by_inductor"])


def start(side: Side, suffix: str = "", *, strategy: Any = None, **options: Any) -> Any:
    from lightning.fabric import Fabric

    strategy = strategy or side.choose("ddp", "paceline") + suffix
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, **options)
    fabric.launch()
    fabric.seed_everything(3, verbose=False)
    return fabric


def loader(fabric: Any) -> Any:
    return fabric.setup_dataloaders(DataLoader(dataset(), batch_size=4, shuffle=True))


def adam(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def step(fabric: Any, model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    fabric.backward(loss)
    optimizer.step()
    return loss


def train(fabric: Any, model: Any, optimizer: Any, epochs: int = 2) -> list[Any]:
    batches = loader(fabric)
    return [step(fabric, model, optimizer, x, y) for _ in range(epochs) for x, y in batches]


def prepared(fabric: Any, module: torch.nn.Module) -> tuple[Any, Any]:
    return fabric.setup(module, adam(module))


@table
def plain(side: Side) -> Curve:
    fabric = start(side)
    model, optimizer = prepared(fabric, make())
    return Curve(model, train(fabric, model, optimizer))


@table
def accumulate(side: Side) -> Curve:
    fabric = start(side)
    model, optimizer = prepared(fabric, make())
    losses = []
    for number, (x, y) in enumerate(loader(fabric)):
        with fabric.no_backward_sync(model, enabled=number % 2 == 0):
            loss = F.cross_entropy(model(x), y)
            fabric.backward(loss / 2)
        losses.append(loss)
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return Curve(model, losses)


@table
def clip_gradients(side: Side) -> Curve:
    fabric = start(side)
    model, optimizer = prepared(fabric, make())
    losses, norms = [], []
    for number, (x, y) in enumerate(loader(fabric)):
        optimizer.zero_grad()
        losses.append(F.cross_entropy(model(x), y))
        fabric.backward(losses[-1])
        limit = {"max_norm": 0.1} if number % 2 else {"clip_val": 0.01}
        norms.append(fabric.clip_gradients(model, optimizer, **limit))
        optimizer.step()
    return Curve(model, losses, [norm for norm in norms if norm is not None])


@table
def uneven_inputs(side: Side) -> Curve:
    fabric = start(side)
    model, optimizer = prepared(fabric, make().eval())
    x, y = dataset().tensors
    losses = []
    with model._forward_module.join():
        for number in range(3 + 2 * fabric.global_rank):
            part = slice(4 * number, 4 * number + 4)
            losses.append(step(fabric, model, optimizer, x[part], y[part]))
    return Curve(model, losses)


@table
def gather_and_reduce(side: Side) -> Curve:
    fabric = start(side)
    model, optimizer = prepared(fabric, make())
    losses = train(fabric, model, optimizer, epochs=1)
    gathered = fabric.all_gather(losses[-1].detach())
    mean = fabric.all_reduce(losses[-1].detach(), reduce_op="mean")
    samples = torch.tensor([5 - 8 * fabric.global_rank, 2**40 + fabric.global_rank])
    more = [gathered, mean, fabric.all_reduce(samples, reduce_op="mean")]
    fabric.barrier()
    return Curve(model, losses, [*more, fabric.broadcast(float(losses[0]))])


@table
def save_and_resume(side: Side) -> Curve:
    fabric = start(side)
    model, optimizer = prepared(fabric, make())
    losses = train(fabric, model, optimizer, epochs=1)
    path = os.path.join(side.folder, "state.ckpt")
    fabric.save(path, {"model": model, "optimizer": optimizer, "epoch": 1})
    model, optimizer = prepared(fabric, make())
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    fabric.load(path, state)
    # Whoever loads the file without Fabric finds plain names.
    plain_names = list(torch.load(path, weights_only=True)["model"])
    assert plain_names == list(make().state_dict())
    return Curve(model, losses + train(fabric, model, optimizer, epochs=1), [state["epoch"]])


@table
def save_before_and_after_setup(side: Side) -> Curve:
    """A file of either kind can be loaded into a module with and without its wrapper."""
    fabric = start(side)
    module = make()
    paths = [os.path.join(side.folder, name) for name in ("before.ckpt", "after.ckpt")]
    fabric.save(paths[0], {"model": module})
    model, optimizer = prepared(fabric, module)
    fabric.save(paths[1], {"model": model})
    losses = train(fabric, model, optimizer, epochs=1)
    for target in (model, make()):
        for path in paths:
            with torch.no_grad():
                for parameter in target.parameters():
                    parameter.zero_()
            fabric.load(path, {"model": target})
            assert all(map(torch.equal, target.parameters(), make().parameters()))
    return Curve(model, losses)


@table
def find_unused_parameters(side: Side) -> Curve:
    fabric = start(side, "_find_unused_parameters_true")
    model, optimizer = prepared(fabric, make(branch=True))
    return Curve(model, train(fabric, model, optimizer))


@table
def static_graph(side: Side) -> Curve:
    from lightning.fabric.strategies import DDPStrategy

    from paceline.integrations.lightning import FabricDDPStrategy

    kind = side.choose(DDPStrategy, FabricDDPStrategy)
    fabric = start(side, strategy=kind(static_graph=True))
    model, optimizer = prepared(fabric, make(checkpointed=True))
    return Curve(model, train(fabric, model, optimizer))


@table
def gradient_checkpointing(side: Side) -> Curve:
    fabric = start(side)
    model, optimizer = prepared(fabric, make(checkpointed=True))
    return Curve(model, train(fabric, model, optimizer))


def train_compiled(side: Side, backend: str) -> Curve:
    torch._dynamo.reset()
    fabric = start(side)
    model, optimizer = prepared(fabric, torch.compile(make(), backend=backend))
    return Curve(model, train(fabric, model, optimizer, epochs=1))


@table
def compiled(side: Side) -> Curve:
    return train_compiled(side, "aot_eager")


@table
def compiled_by_inductor(side: Side) -> Curve:
    return train_compiled(side, "inductor")


@table
def bf16_mixed(side: Side) -> Curve:
    fabric = start(side, precision="bf16-mixed")
    model, optimizer = prepared(fabric, make())
    return Curve(model, train(fabric, model, optimizer))


@table
def fp16_mixed(side: Side) -> Curve:
    """On CPUs Lightning makes bf16 of ``precision="16-mixed"``; its plugin does as it is told."""
    from lightning.fabric.plugins import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
    fabric = start(side, plugins=MixedPrecision("16-mixed", "cpu", scaler))
    model, optimizer = prepared(fabric, make())
    losses = train(fabric, model, optimizer)
    assert scaler.get_scale() < 2.0**20, "no step was left out"
    return Curve(model, losses, [scaler.get_scale()])


@table
def bf16_true(side: Side) -> Curve:
    fabric = start(side, precision="bf16-true")
    with fabric.init_module():
        module = make()
    model, optimizer = prepared(fabric, module)
    return Curve(model, train(fabric, model, optimizer))


@table
def averages_ema_and_swa(side: Side) -> Curve:
    fabric = start(side)
    module = make()
    model, optimizer = prepared(fabric, module)
    averages = Averages(module)
    losses = []
    for x, y in loader(fabric):
        losses.append(step(fabric, model, optimizer, x, y))
        averages.update()
    return Curve(model, losses, averages.parameters())


@table
def callbacks(side: Side) -> Curve:
    class Recorder:
        def __init__(self) -> None:
            self.seen: list[float] = []

        def on_after_backward(self, loss: Any) -> None:
            self.seen.append(float(loss))

    recorder = Recorder()
    fabric = start(side, callbacks=[recorder])
    model, optimizer = prepared(fabric, make())
    losses = []
    for x, y in loader(fabric):
        losses.append(step(fabric, model, optimizer, x, y))
        fabric.call("on_after_backward", loss=losses[-1])
    return Curve(model, losses, recorder.seen)


@table
def schedule(side: Side) -> Curve:
    fabric = start(side)
    model, optimizer = prepared(fabric, make())
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
    losses, seen = [], []
    for x, y in loader(fabric):
        losses.append(step(fabric, model, optimizer, x, y))
        rates.step()
        seen.append(rates.get_last_lr()[0])
    assert len(set(seen)) > 1
    return Curve(model, losses, seen)


@table
def torchmetrics(side: Side) -> Curve:
    from torchmetrics.classification import MulticlassAccuracy

    fabric = start(side)
    model, optimizer = prepared(fabric, make())
    accuracy = MulticlassAccuracy(num_classes=3)
    losses, values = [], []
    for x, y in loader(fabric):
        accuracy.update(model(x), y)
        losses.append(step(fabric, model, optimizer, x, y))
    values.append(accuracy.compute())  # over both ranks
    return Curve(model, losses, values)


@table
def lora(side: Side) -> Curve:
    from peft import LoraConfig, get_peft_model

    fabric = start(side)
    fabric.seed_everything(3, verbose=False)
    module = get_peft_model(make(), LoraConfig(r=2, target_modules=["last", "middle.0"]))
    assert sum(p.requires_grad for p in module.parameters()) == 4
    model, optimizer = prepared(fabric, module)
    return Curve(model, train(fabric, model, optimizer))


@pytest.fixture(scope="module")
def told() -> dict[str, list[Any]]:
    return table.run()


@pytest.mark.parametrize("name", table.features)
def test_feature(name: str, told: dict[str, list[Any]]) -> None:
    check(told[name])


def test_on_both_backends(told: dict[str, list[Any]]) -> None:
    check_backends(table, told)
