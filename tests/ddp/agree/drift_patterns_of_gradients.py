"""Ways to compute and accumulate gradients that are right, and must not be taken for drift."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision
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
from tests.ddp.compare import batch
from tests.ddp.models import mlp


@own_setting
def plain(transport: str) -> None:
    for make in (
        lambda p: SGD(p, lr=0.1, momentum=0.9),
        lambda p: AdamW(p, fused=True),
        lambda p: AdamW(p, foreach=True),
    ):
        ddp = DDP(mlp(4), transport=transport)
        optimizer = make(ddp.parameters())
        for step in range(STEPS):
            train(ddp, optimizer, step)
        assert_equal_models(ddp)


@pattern
def uneven_accumulation(ddp: DDP, optimizer: SGD) -> None:
    """Different numbers of micro-batches on ranks, weighted by them."""
    for step in range(STEPS):
        optimizer.zero_grad()
        count = 1 + (step + dist.get_rank()) % 3
        for micro in range(count):
            with contextlib.ExitStack() as stack:
                if micro < count - 1:
                    stack.enter_context(ddp.no_sync())
                stack.enter_context(ddp.weighted(count))
                loss(ddp, 10 * step + micro).backward()
        optimizer.step()


@pattern
def accumulation_past_the_wrapper(ddp: DDP, optimizer: SGD) -> None:
    """Gradients through ddp.module before a synchronised backward, which averages the sum."""
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(ddp.module, step + 10).backward()
        loss(ddp, step).backward()
        optimizer.step()


@pattern
def synchronised_accumulation(ddp: DDP, optimizer: SGD) -> None:
    """Every micro-batch is synchronised; an update after every third."""
    for step in range(9):
        loss(ddp, step).backward()
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


@pattern
def evaluation_on_one_rank(ddp: DDP, optimizer: SGD) -> None:
    for step in range(STEPS):
        if is_first():
            with torch.no_grad():
                loss(ddp, step)
            loss(ddp, step)  # with a graph, and no backward
            loss(ddp.module, step)
        train(ddp, optimizer, step)


@pattern
def saliency_on_one_rank(ddp: DDP, optimizer: SGD) -> None:
    """A backward of one rank alone, whose gradients are thrown away."""
    for step in range(STEPS):
        if is_first():
            for model in (ddp.module, ddp):
                x = batch(step).requires_grad_()
                with ddp.no_sync():
                    model(x).sum().backward()
            optimizer.zero_grad()
        train(ddp, optimizer, step)
        if is_first():
            loss(ddp.module, step).backward()


@own_setting
def gan(transport: str) -> None:
    """The critic gets gradients in the generator's step: averaged, local, or it is frozen."""
    for way in ("wrapper", "module", "frozen"):
        generator, critic = DDP(mlp(4), transport=transport), DDP(mlp(4), transport=transport)
        of_generator = SGD(generator.parameters(), lr=0.1)
        of_critic = SGD(critic.parameters(), lr=0.1)
        for step in range(STEPS):
            fake = generator(batch(step))
            of_critic.zero_grad()
            (critic(fake.detach()).mean() - critic(batch(step + 10)).mean()).backward()
            of_critic.step()
            of_generator.zero_grad()
            critic.requires_grad_(way != "frozen")
            (critic.module if way == "module" else critic)(fake).mean().backward()
            critic.requires_grad_(True)
            of_generator.step()
        assert_equal_models(generator)
        assert_equal_models(critic)


@pattern
def several_forwards(ddp: DDP, optimizer: SGD) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        (loss(ddp, step) + loss(ddp, step + 10)).backward()
        optimizer.step()


@pattern
def uneven_inputs(ddp: DDP, optimizer: SGD) -> None:
    """Two epochs with join(), ranks with different numbers of batches."""
    for epoch in range(2):
        with ddp.join():
            for step in range(3 + 2 * dist.get_rank()):
                train(ddp, optimizer, 10 * epoch + step)
    for step in range(2):
        train(ddp, optimizer, step)


@own_setting
def options(transport: str) -> None:
    for chosen in (
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"nonfinite": "skip"},
        {"missing_gradients": "wait"},
        {"gradient_as_bucket_view": False},
        {"mixed_precision": _MixedPrecision(param_dtype=torch.bfloat16)},
    ):
        ddp = DDP(mlp(4), transport=transport, **chosen)
        optimizer = SGD(ddp.parameters(), lr=0.1)
        for step in range(STEPS):
            for micro in range((step * (1 + dist.get_rank())) % 2):
                with ddp.no_sync():
                    loss(ddp, step + micro + 20).backward()
            loss(ddp, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_equal_models(ddp)


@pattern
def averaged_by_hand(ddp: DDP, optimizer: SGD) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(ddp.module, step).backward()
        for parameter in ddp.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()


@pattern
def local_forwards_averaged_by_hand(ddp: DDP, optimizer: SGD) -> None:
    """The backward is outside of no_sync, and so is the average."""
    for step in range(STEPS):
        optimizer.zero_grad()
        with ddp.no_sync():
            value = loss(ddp, step)
        value.backward()
        for parameter in ddp.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()


@pattern
def synchronised_at_the_last_backward(ddp: DDP, optimizer: SGD) -> None:
    """As Accelerate's trigger_sync_in_backward: only the last backward knows that it is one."""
    for step in range(STEPS):
        optimizer.zero_grad()
        with ddp.no_sync():
            first, last = loss(ddp, 2 * step), loss(ddp, 2 * step + 1)
        first.backward()
        ddp.reducer.prepare_for_backward([])
        last.backward()
        optimizer.step()


@pattern
def local_backwards_thrown_away(ddp: DDP, optimizer: SGD) -> None:
    for step in range(STEPS):
        with ddp.no_sync():
            probe = loss(ddp, step)
        probe.backward()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        optimizer.step()
        train(ddp, optimizer, step)


@own_setting
def shared_layers(transport: str) -> None:
    """Two tasks on one trunk, in turn: each wrapper sees the other's gradients of the trunk."""
    trunk = mlp(4)
    tasks = [DDP(nn.Sequential(trunk, nn.Linear(4, 2)), transport=transport) for _ in range(2)]
    optimizer = SGD({p: None for task in tasks for p in task.parameters()}, lr=0.1)
    for step in range(8):
        train(tasks[step % 2], optimizer, step)
    for task in tasks:
        assert_equal_models(task)


@pattern
def penalty_after_the_backward(ddp: DDP, optimizer: SGD) -> None:
    """A gradient of the weights alone is the same on every rank."""
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(ddp, step).backward()
        (0.01 * sum(p.square().sum() for p in ddp.parameters())).backward()
        optimizer.step()


class RunsOut(nn.Module):
    """Raises for more rows than memory would hold."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(4)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 4:
            raise MemoryError("too many rows")
        return self.body(x)


@own_setting
def batch_run_again_in_halves(transport: str) -> None:
    ddp = DDP(RunsOut(), transport=transport)
    optimizer = SGD(ddp.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = batch(step, rows=8 if not is_first() and step == 2 else 4)
        try:
            ddp(x).square().mean().backward()
        except MemoryError:
            with ddp.no_sync():
                ddp(x[:4]).square().mean().backward()
            ddp(x[4:]).square().mean().backward()
        optimizer.step()
    assert_equal_models(ddp)


@own_setting
def left_out_everywhere(transport: str) -> None:
    ddp = DDP(RunsOut(), transport=transport)
    optimizer = SGD(ddp.parameters(), lr=0.1)
    for step in range(STEPS):
        with contextlib.suppress(MemoryError):
            optimizer.zero_grad()
            loss(ddp, step, rows=8 if step == 2 else 4).backward()
            optimizer.step()
    assert_equal_models(ddp)
