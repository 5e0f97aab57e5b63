"""What Ray's workers train, feature by feature (test_ray.py)."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader

from tests.integrations.table import RANKS, Curve, Side, Table
from tests.integrations.workload import Averages, dataset, make

table = Table()


def prepared(module: torch.nn.Module, samples: int = 48, **options: Any) -> Any:
    from ray.train.torch import prepare_data_loader, prepare_model

    model = prepare_model(module, parallel_strategy_kwargs=options)
    loader = prepare_data_loader(DataLoader(dataset(samples), batch_size=4, shuffle=True))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01), loader


def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def train(module: torch.nn.Module, **options: Any) -> Curve:
    model, optimizer, loader = prepared(module, **options)
    return Curve(model, [step(model, optimizer, x, y) for x, y in loader])


@table
def plain(_: Side) -> Curve:
    return train(make())


@table
def accumulate(_: Side) -> Curve:
    model, optimizer, loader = prepared(make())
    losses = []
    for number, (x, y) in enumerate(loader):
        if number % 2 == 0:
            with model.no_sync():
                losses.append(F.cross_entropy(model(x), y))
                losses[-1].backward()
        else:
            losses.append(F.cross_entropy(model(x), y))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
    return Curve(model, losses)


@table
def clip_gradients(_: Side) -> Curve:
    model, optimizer, loader = prepared(make())
    losses, norms = [], []
    for x, y in loader:
        optimizer.zero_grad()
        losses.append(F.cross_entropy(model(x), y))
        losses[-1].backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
    return Curve(model, losses, norms)


@table
def uneven_inputs(_: Side) -> Curve:
    model, optimizer, _loader = prepared(make().eval())
    x, y = dataset().tensors
    losses = []
    with model.join():
        for number in range(3 + 2 * dist.get_rank()):
            part = slice(4 * number, 4 * number + 4)
            losses.append(step(model, optimizer, x[part], y[part]))
    return Curve(model, losses)


@table
def find_unused_parameters(_: Side) -> Curve:
    return train(make(branch=True), find_unused_parameters=True)


@table
def static_graph(_: Side) -> Curve:
    return train(make(checkpointed=True), static_graph=True)


@table
def schedule(_: Side) -> Curve:
    model, optimizer, loader = prepared(make())
    rates = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    losses, seen = [], []
    for x, y in loader:
        losses.append(step(model, optimizer, x, y))
        rates.step()
        seen.append(rates.get_last_lr()[0])
    assert len(set(seen)) > 1
    return Curve(model, losses, seen)


@table
def fp16_with_a_scaler(_: Side) -> Curve:
    model, optimizer, loader = prepared(make())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
    losses = []
    for x, y in loader:
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss)
    assert scaler.get_scale() < 2.0**20, "no step was left out"
    return Curve(model, losses, [scaler.get_scale()])


@table
def gradient_checkpointing(_: Side) -> Curve:
    return train(make(checkpointed=True))


@table
def bf16(_: Side) -> Curve:
    model, optimizer, loader = prepared(make())
    losses = []
    for x, y in loader:
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return Curve(model, losses)


@table
def save_and_resume(side: Side) -> Curve:
    model, optimizer, loader = prepared(make())
    losses = [step(model, optimizer, x, y) for x, y in loader]
    path = os.path.join(side.folder, "state.pt")
    if dist.get_rank() == 0:
        torch.save({"model": model.module.state_dict(), "optim": optimizer.state_dict()}, path)
    dist.barrier()
    state = torch.load(path, weights_only=True)
    module = make()
    module.load_state_dict(state["model"])
    model, optimizer, loader = prepared(module)
    optimizer.load_state_dict(state["optim"])
    return Curve(model, losses + [step(model, optimizer, x, y) for x, y in loader])


@table
def averages_ema_and_swa(_: Side) -> Curve:
    model, optimizer, loader = prepared(make())
    averages = Averages(model.module)
    losses = []
    for x, y in loader:
        losses.append(step(model, optimizer, x, y))
        averages.update()
    return Curve(model, losses, averages.parameters())


@table
def compiled(_: Side) -> Curve:
    torch._dynamo.reset()
    return train(torch.compile(make(), backend="aot_eager"))


@table
def torchmetrics(_: Side) -> Curve:
    from torchmetrics.classification import MulticlassAccuracy

    model, optimizer, loader = prepared(make())
    accuracy = MulticlassAccuracy(num_classes=3)
    losses = []
    for x, y in loader:
        accuracy.update(model(x), y)
        losses.append(step(model, optimizer, x, y))
    return Curve(model, losses, [accuracy.compute()])


@table
def gather_and_reduce(_: Side) -> Curve:
    """What Ray leaves to the script: collectives on its group."""
    curve = train(make())
    last = curve.losses[-1].detach()
    gathered = [torch.zeros_like(last) for _ in range(RANKS)]
    dist.all_gather(gathered, last)
    mean = last.clone()
    dist.all_reduce(mean)
    curve.more = [*gathered, mean]
    return curve


@table
def lora(_: Side) -> Curve:
    from peft import LoraConfig, get_peft_model

    return train(get_peft_model(make(), LoraConfig(r=2, target_modules=["last", "middle.0"])))
