"""join(): ranks that run out of inputs take part in the others' collectives."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer

from paceline import DistributedDataParallel as DDP
from paceline.testing import run_ranks
from tests.ddp.compare import TorchDDP, assert_close, assert_identical, batch, gradients, pair
from tests.ddp.models import Bag, Branches, Normed, mlp, seeded


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def train_unevenly(ddp: DDP | TorchDDP, **join_options: bool) -> list[int]:
    """Rank r has 2 + 2 r inputs; return the ranks' numbers of steps done."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    done = 0
    with ddp.join(**join_options):
        for step in range(2 + 2 * dist.get_rank()):
            optimizer.zero_grad()
            ddp(batch(step)).square().mean().backward()
            optimizer.step()
            done += 1
    return [done]


@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("world", [2, 3])
def test_equals_torch(world: int, initial: bool) -> None:
    def on_rank() -> None:
        ours, theirs = pair(mlp(4), bucket_cap_mb=1e-4)
        for ddp in (ours, theirs):
            train_unevenly(ddp, divide_by_initial_world_size=initial)
        found, expected = parameters(ours.module), parameters(theirs.module)
        if world == 2:
            assert_identical(found, expected)
        else:
            assert_close(found, expected)

    run_ranks(world, on_rank)


@pytest.mark.parametrize("initial", [True, False])
def test_divisor(initial: bool) -> None:
    """Rank 1 alone in the last two steps: its gradient counts half, or whole."""

    def on_rank() -> list[float]:
        model = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(0)
        ddp = DDP(model)
        seen = []
        with ddp.join(divide_by_initial_world_size=initial):
            for _ in range(1 + 2 * dist.get_rank()):
                ddp.zero_grad()
                ddp(torch.ones(1, 1)).sum().backward()
                seen.append(model.weight.grad.item())
        return seen

    alone = 0.5 if initial else 1.0
    assert run_ranks(2, on_rank) == [[1.0], [1.0, alone, alone]]


def test_model_of_the_last_rank_is_everybodys_at_the_end() -> None:
    def on_rank() -> dict[str, Tensor]:
        ddp = DDP(seeded(Normed))
        train_unevenly(ddp)
        return parameters(ddp.module)

    first, second = run_ranks(2, on_rank)
    assert_identical(first, second)
    assert first["norm.num_batches_tracked"].item() == 4


def test_buffers() -> None:
    def on_rank() -> None:
        ours, theirs = pair(seeded(Normed))
        for ddp in (ours, theirs):
            train_unevenly(ddp)
        assert_identical(parameters(ours.module), parameters(theirs.module))

    run_ranks(2, on_rank)


def test_unused_parameters() -> None:
    def on_rank() -> None:
        torch.manual_seed(0)
        ours, theirs = pair(Branches(), find_unused_parameters=True, bucket_cap_mb=1e-4)
        for ddp in (ours, theirs):
            with ddp.join():
                for step in range(2 + 2 * dist.get_rank()):
                    ddp.zero_grad()
                    ddp(batch(step), "abc"[: 1 + step % 2]).mean().backward()
        if dist.get_rank() == 1:
            assert_identical(gradients(ours), gradients(theirs))
            assert gradients(ours)["branches.c.weight"] is None

    run_ranks(2, on_rank)


def test_static_graph() -> None:
    def on_rank() -> None:
        ddp, plain = DDP(mlp(4), static_graph=True), DDP(mlp(4))
        for each in (ddp, plain):
            train_unevenly(each)
        assert_identical(parameters(ddp.module), parameters(plain.module))

    run_ranks(2, on_rank)


def test_sparse_gradients() -> None:
    def tokens(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step * 10 + dist.get_rank())
        return torch.randint(12, (3, 4), generator=generator)

    def on_rank() -> list[Tensor]:
        model = seeded(Bag)
        ddp = DDP(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with ddp.join():
            for step in range(1 + 2 * dist.get_rank()):
                optimizer.zero_grad()
                ddp(tokens(step)).square().mean().backward()
                optimizer.step()
        return [value.clone() for value in model.state_dict().values()]

    first, second = run_ranks(2, on_rank)
    for one, two in zip(first, second, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_no_sync() -> None:
    def on_rank() -> None:
        ours, theirs = pair(mlp(4))
        for ddp in (ours, theirs):
            with ddp.join():
                for step in range(2 + 2 * dist.get_rank()):
                    local = step % 2 == 0
                    with ddp.no_sync() if local else contextlib.nullcontext():
                        ddp(batch(step)).square().mean().backward()
        if dist.get_rank() == 1:
            assert_identical(gradients(ours), gradients(theirs))

    run_ranks(2, on_rank)


def test_comm_hook() -> None:
    def on_rank() -> None:
        ours, theirs = pair(mlp(4))
        for ddp in (ours, theirs):
            ddp.register_comm_hook(None, allreduce_hook)
            train_unevenly(ddp)
        assert_identical(parameters(ours.module), parameters(theirs.module))

    run_ranks(2, on_rank)


def test_throw_on_early_termination() -> None:
    def on_rank() -> tuple[int, str]:
        ddp = DDP(mlp(4))
        done = 0
        try:
            with ddp.join(throw_on_early_termination=True):
                for step in range(2 + 2 * dist.get_rank()):
                    ddp(batch(step)).square().mean().backward()
                    done += 1
        except RuntimeError as error:
            return done, str(error)
        return done, "nothing raised"

    for done, text in run_ranks(2, on_rank):
        assert done == 2
        assert "exhausted" in text


def test_disabled() -> None:
    def on_rank() -> None:
        ours, theirs = pair(mlp(4))
        for ddp in (ours, theirs):
            with ddp.join(enable=False):
                for step in range(3):
                    ddp(batch(step)).square().mean().backward()
        assert_identical(gradients(ours), gradients(theirs))

    run_ranks(2, on_rank)


def test_again_after_a_join() -> None:
    """A second epoch, and plain steps after it."""

    def on_rank() -> None:
        ours, theirs = pair(mlp(4), bucket_cap_mb=1e-4)
        for ddp in (ours, theirs):
            for _ in range(2):
                train_unevenly(ddp)
            ddp.zero_grad()
            ddp(batch(77)).square().mean().backward()
        assert_identical(gradients(ours), gradients(theirs))

    run_ranks(2, on_rank)


def test_with_a_sharded_optimizer() -> None:
    """ZeRO steps a joined rank's shard too, with the peers' gradients: the same as plain SGD.

    (On torch's DDP a joined rank keeps its last gradients, and ZeRO would step with those.)
    """

    def on_rank() -> None:
        ddp, plain = DDP(mlp(4)), DDP(mlp(4))
        optimizer = ZeroRedundancyOptimizer(
            ddp.parameters(), optimizer_class=torch.optim.SGD, lr=0.1
        )
        with Join([ddp, optimizer]):
            for step in range(2 + 2 * dist.get_rank()):
                optimizer.zero_grad()
                ddp(batch(step)).square().mean().backward()
                optimizer.step()
        train_unevenly(plain)
        assert_identical(parameters(ddp.module), parameters(plain.module))

    run_ranks(2, on_rank)


def test_two_wrappers_in_one_join() -> None:
    def on_rank() -> None:
        one, two = pair(mlp(4)), pair(mlp(4, seed=1))
        for first, second in zip(one, two, strict=True):
            with Join([first, second]):
                for step in range(2 + 2 * dist.get_rank()):
                    for ddp in (first, second):
                        ddp.zero_grad()
                        ddp(batch(step)).square().mean().backward()
        if dist.get_rank() == 1:
            for ours, theirs in (one, two):
                assert_identical(gradients(ours), gradients(theirs))

    run_ranks(2, on_rank)
