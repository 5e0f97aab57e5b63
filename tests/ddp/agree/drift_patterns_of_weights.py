"""Ways to update and exchange weights that are right, and must not be taken for drift."""

from __future__ import annotations

import contextlib
import copy

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import SGD, AdamW

from paceline import DistributedDataParallel as DDP
from tests.ddp.agree.drift_pattern import (
    STEPS,
    assert_equal_models,
    is_first,
    loss,
    own_setting,
    pattern,
    train,
)
from tests.ddp.models import mlp


@pattern
def moving_average_on_one_rank(ddp: DDP, optimizer: SGD) -> None:
    """Rank 0 evaluates with other weights and brings its own back, also between micro-batches."""
    average = copy.deepcopy(ddp.module.state_dict())
    for step in range(6):
        if step % 3 == 0:
            optimizer.zero_grad()
        with ddp.no_sync() if step % 3 == 0 else contextlib.nullcontext():
            loss(ddp, step).backward()
        if is_first():
            own = copy.deepcopy(ddp.module.state_dict())
            ddp.module.load_state_dict(average)
            with torch.no_grad():
                loss(ddp, step)
            ddp.module.load_state_dict(own)
        if step % 3 == 2:
            optimizer.step()


@own_setting
def sharded_optimizer(transport: str) -> None:
    """Each rank steps its own share: versions of parameters differ between ranks."""
    ddp = DDP(mlp(4), transport=transport)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optimizer_class=SGD, lr=0.1)
    for step in range(STEPS):
        train(ddp, optimizer, step)
    assert_equal_models(ddp)


@own_setting
def sharded_by_hand(transport: str) -> None:
    """The same without an optimizer."""
    ddp = DDP(mlp(4), transport=transport)
    for step in range(STEPS):
        ddp.zero_grad()
        loss(ddp, step).backward()
        for index, parameter in enumerate(ddp.parameters()):
            owner = index % dist.get_world_size()
            if owner == dist.get_rank():
                with torch.no_grad():
                    parameter -= 0.1 * parameter.grad
            dist.broadcast(parameter.data, owner)
    assert_equal_models(ddp)


@pattern
def local_sgd(ddp: DDP, optimizer: SGD) -> None:
    for step in range(24):
        with ddp.no_sync():
            train(ddp, optimizer, step)
        if step % 8 == 7:
            for parameter in ddp.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= dist.get_world_size()


@own_setting
def optimizer_prepared_on_one_rank(transport: str) -> None:
    """As torch.distributed.checkpoint does to give an optimizer a state."""
    ddp = DDP(mlp(4), transport=transport)
    optimizer = AdamW(ddp.parameters(), lr=0.0)
    if is_first():
        for parameter in ddp.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    for step in range(STEPS):
        train(ddp, optimizer, step)
    assert_equal_models(ddp)


@pattern
def optimizer_compiled_on_one_rank(ddp: DDP, optimizer: SGD) -> None:
    """The others may have fallen back to eager mode."""
    update = torch.compile(optimizer.step, backend="eager") if is_first() else optimizer.step
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(ddp, step).backward()
        update()


@own_setting
def closures(transport: str) -> None:
    ddp = DDP(mlp(4), transport=transport)
    optimizer = torch.optim.LBFGS(ddp.parameters(), lr=0.1, max_iter=3, tolerance_change=0.0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(ddp, 0)
        value.backward()
        return value

    for _ in range(3):
        optimizer.step(closure)
    assert_equal_models(ddp)


@own_setting
def two_optimizers(transport: str) -> None:
    """In turn, each for a part; and one that holds another model, too."""
    ddp, other = DDP(mlp(4), transport=transport), mlp(4)
    parts = list(ddp.parameters())
    ours = [SGD(parts[:2], lr=0.1), SGD([*parts[2:], *other.parameters()], lr=0.1)]
    for step in range(6):
        ddp.zero_grad()
        loss(ddp, step).backward()
        ours[step % 2].step()
    assert_equal_models(ddp)


@pattern
def restored_on_one_rank(ddp: DDP, optimizer: SGD) -> None:
    """Rank 0 reads a checkpoint, and the others take its parameters."""
    saved = copy.deepcopy(ddp.module.state_dict())
    for step in range(6):
        if step == 3:
            if is_first():
                ddp.module.load_state_dict(saved)
            for parameter in ddp.parameters():
                value = parameter.detach().clone()
                dist.broadcast(value, 0)
                if not is_first():
                    with torch.no_grad():
                        parameter.copy_(value)
        train(ddp, optimizer, step)


@own_setting
def sharpness_aware(transport: str) -> None:
    """SAM: weights are moved along each rank's own gradient, and moved back after a second pass."""
    ddp = DDP(mlp(4), transport=transport)
    optimizer = SGD(ddp.parameters(), lr=0.1)
    for step in range(20):
        optimizer.zero_grad()
        with ddp.no_sync():
            loss(ddp, step).backward()
        moves = [0.05 * p.grad for p in ddp.parameters()]
        with torch.no_grad():
            for parameter, move in zip(ddp.parameters(), moves, strict=True):
                parameter.add_(move)
        optimizer.zero_grad()
        loss(ddp, step).backward()
        with torch.no_grad():
            for parameter, move in zip(ddp.parameters(), moves, strict=True):
                parameter.sub_(move)
        optimizer.step()


@own_setting
def inner_steps(transport: str) -> None:
    """First-order meta-learning in place: an inner step of each rank's own, which is taken back."""
    ddp = DDP(mlp(4), transport=transport)
    inner, outer = SGD(ddp.parameters(), lr=0.05), SGD(ddp.parameters(), lr=0.1)
    for step in range(20):
        before = copy.deepcopy(ddp.module.state_dict())
        inner.zero_grad()
        loss(ddp.module, step).backward()
        inner.step()
        outer.zero_grad()
        loss(ddp, step + 50).backward()
        ddp.module.load_state_dict(before)
        outer.step()
    assert_equal_models(ddp)
