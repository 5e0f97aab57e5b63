"""What is right in torch's DDP must not be taken for drift: warnings are errors in these ranks.

Each pattern trains a few steps on a wrapper of its own; all of them run in the same ranks, one
after the other. A pattern that raises or warns is named.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel.distributed import _MixedPrecision
from torch.optim import SGD, AdamW

from paceline import DistributedDataParallel as DDP
from paceline.testing import run_ranks
from tests.ddp.compare import assert_same_on_all_ranks, batch
from tests.ddp.models import mlp

STEPS = 5


def loss(model: nn.Module, step: int, rows: int = 4) -> Tensor:
    return model(batch(step, rows=rows)).square().mean()


def train(ddp: DDP, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    loss(ddp, step).backward()
    optimizer.step()


def is_first() -> bool:
    return dist.get_rank() == 0


def assert_equal_models(ddp: nn.Module) -> None:
    assert_same_on_all_ranks({name: p.detach() for name, p in ddp.named_parameters()})


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


def uneven_accumulation(transport: str) -> None:
    """Different numbers of micro-batches on ranks, weighted by them."""
    ddp = DDP(mlp(4), transport=transport)
    optimizer = SGD(ddp.parameters(), lr=0.1)
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
    assert_equal_models(ddp)


def accumulation_past_the_wrapper(transport: str) -> None:
    """Gradients through ddp.module before a synchronised backward, which averages the sum."""
    ddp = DDP(mlp(4), transport=transport)
    optimizer = SGD(ddp.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(ddp.module, step + 10).backward()
        train_without_zero(ddp, optimizer, step)
    assert_equal_models(ddp)


def train_without_zero(ddp: DDP, optimizer: torch.optim.Optimizer, step: int) -> None:
    loss(ddp, step).backward()
    optimizer.step()


def synchronised_accumulation(transport: str) -> None:
    """Every micro-batch is synchronised; an update after every third."""
    ddp = DDP(mlp(4), transport=transport)
    optimizer = SGD(ddp.parameters(), lr=0.1)
    for step in range(9):
        loss(ddp, step).backward()
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    assert_equal_models(ddp)


def evaluation_on_one_rank(transport: str) -> None:
    ddp = DDP(mlp(4), transport=transport)
    optimizer = SGD(ddp.parameters(), lr=0.1)
    for step in range(STEPS):
        if is_first():
            with torch.no_grad():
                loss(ddp, step)
            loss(ddp, step)  # with a graph, and no backward
            loss(ddp.module, step)
        train(ddp, optimizer, step)
    assert_equal_models(ddp)


def saliency_on_one_rank(transport: str) -> None:
    """A backward of one rank alone, whose gradients are thrown away."""
    ddp = DDP(mlp(4), transport=transport)
    optimizer = SGD(ddp.parameters(), lr=0.1)
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
    assert_equal_models(ddp)


def moving_average_on_one_rank(transport: str) -> None:
    """Rank 0 evaluates with other weights and brings its own back, also between micro-batches."""
    ddp = DDP(mlp(4), transport=transport)
    optimizer = SGD(ddp.parameters(), lr=0.1)
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
    assert_equal_models(ddp)


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


def several_forwards(transport: str) -> None:
    ddp = DDP(mlp(4), transport=transport)
    optimizer = SGD(ddp.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        (loss(ddp, step) + loss(ddp, step + 10)).backward()
        optimizer.step()
    assert_equal_models(ddp)


def uneven_inputs(transport: str) -> None:
    """Two epochs with join(), ranks with different numbers of batches."""
    ddp = DDP(mlp(4), transport=transport)
    optimizer = SGD(ddp.parameters(), lr=0.1)
    for epoch in range(2):
        with ddp.join():
            for step in range(3 + 2 * dist.get_rank()):
                train(ddp, optimizer, 10 * epoch + step)
    for step in range(2):
        train(ddp, optimizer, step)
    assert_equal_models(ddp)


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


def sharded_optimizer(transport: str) -> None:
    """Each rank steps its own share: versions of parameters differ between ranks."""
    ddp = DDP(mlp(4), transport=transport)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optimizer_class=SGD, lr=0.1)
    for step in range(STEPS):
        train(ddp, optimizer, step)
    assert_equal_models(ddp)


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


def local_sgd(transport: str) -> None:
    ddp = DDP(mlp(4), transport=transport)
    optimizer = SGD(ddp.parameters(), lr=0.1)
    for step in range(24):
        with ddp.no_sync():
            train(ddp, optimizer, step)
        if step % 8 == 7:
            for parameter in ddp.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= dist.get_world_size()
    assert_equal_models(ddp)


def averaged_by_hand(transport: str) -> None:
    ddp = DDP(mlp(4), transport=transport)
    optimizer = SGD(ddp.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(ddp.module, step).backward()
        for parameter in ddp.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
    assert_equal_models(ddp)


def shared_layers(transport: str) -> None:
    """Two tasks on one trunk, in turn: each wrapper sees the other's gradients of the trunk."""
    trunk = mlp(4)
    tasks = [DDP(nn.Sequential(trunk, nn.Linear(4, 2)), transport=transport) for _ in range(2)]
    optimizer = SGD({p: None for task in tasks for p in task.parameters()}, lr=0.1)
    for step in range(8):
        train(tasks[step % 2], optimizer, step)
    for task in tasks:
        assert_equal_models(task)


def penalty_after_the_backward(transport: str) -> None:
    """A gradient of the weights alone is the same on every rank."""
    ddp = DDP(mlp(4), transport=transport)
    optimizer = SGD(ddp.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(ddp, step).backward()
        (0.01 * sum(p.square().sum() for p in ddp.parameters())).backward()
        optimizer.step()
    assert_equal_models(ddp)


class RunsOut(nn.Module):
    """Raises for more rows than memory would hold."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(4)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 4:
            raise MemoryError("too many rows")
        return self.body(x)


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


def left_out_everywhere(transport: str) -> None:
    ddp = DDP(RunsOut(), transport=transport)
    optimizer = SGD(ddp.parameters(), lr=0.1)
    for step in range(STEPS):
        with contextlib.suppress(MemoryError):
            optimizer.zero_grad()
            loss(ddp, step, rows=8 if step == 2 else 4).backward()
            optimizer.step()
    assert_equal_models(ddp)


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


def optimizer_compiled_on_one_rank(transport: str) -> None:
    """The others may have fallen back to eager mode."""
    ddp = DDP(mlp(4), transport=transport)
    optimizer = SGD(ddp.parameters(), lr=0.1)
    update = torch.compile(optimizer.step, backend="eager") if is_first() else optimizer.step
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(ddp, step).backward()
        update()
    assert_equal_models(ddp)


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


def restored_on_one_rank(transport: str) -> None:
    """Rank 0 reads a checkpoint, and the others take its parameters."""
    ddp = DDP(mlp(4), transport=transport)
    optimizer = SGD(ddp.parameters(), lr=0.1)
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
    assert_equal_models(ddp)


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


PATTERNS: list[Callable[[str], None]] = [
    plain,
    uneven_accumulation,
    accumulation_past_the_wrapper,
    synchronised_accumulation,
    evaluation_on_one_rank,
    saliency_on_one_rank,
    moving_average_on_one_rank,
    gan,
    several_forwards,
    uneven_inputs,
    options,
    sharded_optimizer,
    sharded_by_hand,
    local_sgd,
    averaged_by_hand,
    shared_layers,
    penalty_after_the_backward,
    batch_run_again_in_halves,
    left_out_everywhere,
    optimizer_prepared_on_one_rank,
    optimizer_compiled_on_one_rank,
    closures,
    two_optimizers,
    restored_on_one_rank,
    sharpness_aware,
    inner_steps,
]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_nothing_is_said(transport: str, ranks: int) -> None:
    def on_rank() -> None:
        for pattern in PATTERNS:
            try:
                pattern(transport)
            except BaseException as error:
                error.add_note(f"in the pattern {pattern.__name__}")
                raise

    run_ranks(ranks, on_rank, timeout_s=250)
