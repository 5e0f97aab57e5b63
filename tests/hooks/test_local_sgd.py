"""Post-local SGD and DiLoCo: what they compute, checkpoints, bad arguments."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from paceline import DistributedDataParallel as DDP
from paceline import hooks
from paceline.errors import ConfigurationError
from paceline.testing import RanksFailedError, run_ranks
from tests.hooks.cases import Bucket

WRAPPERS = {"paceline": DDP, "torch": TorchDDP}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def simulate(world: int, steps: int, period: int, lr: float, momentum: float) -> Tensor:
    """DiLoCo in one process: a replica per rank, and torch's SGD as the outer optimizer."""
    center = net()
    outer = torch.optim.SGD(center.parameters(), lr=lr, momentum=momentum, nesterov=momentum > 0)
    replicas = [copy.deepcopy(center) for _ in range(world)]
    inner = [torch.optim.SGD(r.parameters(), lr=0.1) for r in replicas]
    for step in range(steps):
        for rank, (replica, optimizer) in enumerate(zip(replicas, inner, strict=True)):
            optimizer.zero_grad()
            replica(batch(step, rank)).square().mean().backward()
            optimizer.step()
        if (step + 1) % period == 0:
            for p, *copies in zip(
                center.parameters(), *(r.parameters() for r in replicas), strict=True
            ):
                p.grad = p.detach() - torch.stack([c.detach() for c in copies]).mean(dim=0)
            outer.step()
            for replica in replicas:
                replica.load_state_dict(center.state_dict())
    return flat(center)


def diloco(wrap: Any, period: int, **options: Any) -> tuple[nn.Module, Any]:
    model = wrap(net())
    start = options.get("start_step", 0)
    hooks.register(model, "diloco", start_step=start)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, hooks.DiLoCoOptimizer(inner, period=period, **options)


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(batch(step, dist.get_rank())).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (1.0, 0.0)])
def test_diloco_is_local_steps_and_an_outer_nesterov_step(
    wrapper: str, lr: float, momentum: float
) -> None:
    def on_rank() -> Tensor:
        model, optimizer = diloco(WRAPPERS[wrapper], 4, outer_lr=lr, outer_momentum=momentum)
        train(model, optimizer, range(12))
        return flat(model)

    # In a process of its own: to use an optimizer loads what changes the environment.
    [expected] = run_ranks(1, simulate, 2, 12, 4, lr, momentum)
    for found in run_ranks(2, on_rank):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def equal_after_each_step(period: int, *, start_step: int = 0) -> list[bool]:
    """Train for five steps: after which of them the two ranks have the same parameters."""

    def on_rank() -> list[Tensor]:
        model, optimizer = diloco(DDP, period, start_step=start_step)
        snapshots = []
        for step in range(5):
            train(model, optimizer, range(step, step + 1))
            snapshots.append(flat(model))
        return snapshots

    first, second = run_ranks(2, on_rank)
    return [torch.equal(a, b) for a, b in zip(first, second, strict=True)]


def test_ranks_differ_between_meetings_only() -> None:
    assert equal_after_each_step(4) == [False, False, False, True, False]


def test_before_start_step_gradients_are_averaged() -> None:
    assert equal_after_each_step(2, start_step=3) == [True, True, True, False, True]


def test_diloco_resumes_bit_for_bit() -> None:
    def on_rank() -> None:
        model, optimizer = diloco(DDP, 4)
        train(model, optimizer, range(6))
        saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        train(model, optimizer, range(6, 10))
        again, new_optimizer = diloco(DDP, 4)
        again.load_state_dict(saved[0])
        new_optimizer.load_state_dict(saved[1])
        train(again, new_optimizer, range(6, 10))
        assert torch.equal(flat(again), flat(model))

    run_ranks(2, on_rank)


def test_hook_states_resume_in_the_step_they_were_in() -> None:
    """Both count steps: a run that is resumed in its warm-up ends it in the same step."""

    def local_steps(state: Any, hook: Any, steps: int) -> list[bool]:
        found = []
        for _ in range(steps):
            mine = torch.full((4,), float(dist.get_rank()))
            result = hook(state, Bucket(mine, [torch.zeros(4)])).wait()
            found.append(bool((result == dist.get_rank()).all()))
        return found

    def on_rank() -> None:
        alone, _ = dist.new_subgroups(group_size=1)
        for make, hook in (
            (lambda: hooks.PostLocalSGDState(None, alone, 3), hooks.post_localSGD_hook),
            (lambda: hooks.DiLoCoState(start_step=3), hooks.diloco_hook),
        ):
            whole = local_steps(make(), hook, 6)
            assert whole == [False, False, False, True, True, True]
            first, second = make(), make()
            begun = local_steps(first, hook, 2)
            second.load_state_dict(first.state_dict())
            assert begun + local_steps(second, hook, 4) == whole

    run_ranks(2, on_rank)


def test_schedulers_take_both_optimizers() -> None:
    def on_rank() -> None:
        for wrap in (
            lambda inner: hooks.DiLoCoOptimizer(inner, period=2),
            lambda inner: hooks.PostLocalSGDOptimizer(inner, hooks.PeriodicModelAverager(2)),
        ):
            inner = torch.optim.SGD(net().parameters(), lr=0.1, momentum=0.9)
            optimizer = wrap(inner)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)
            rates = []
            for _ in range(3):
                optimizer.step()
                schedule.step()
                rates.append(inner.param_groups[0]["lr"])
            assert len(set(rates)) == 3

    run_ranks(1, on_rank)


@pytest.mark.parametrize("broadcast", [True, False])
def test_buffers_stay_local_only_without_broadcast(broadcast: bool) -> None:
    def on_rank() -> Tensor:
        torch.manual_seed(0)
        model = DDP(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), forward_sync_buffers=broadcast
        )
        hooks.register(model, "diloco")
        for step in range(2):
            model(batch(step, dist.get_rank())).square().mean().backward()
        model.eval()
        model(batch(0, 0))
        return model.module[1].running_mean

    first, second = run_ranks(2, on_rank)
    assert torch.equal(first, second) is broadcast


def test_post_local_sgd_optimizer() -> None:
    """Until the warm-up is over as one process on all data; then parameters meet periodically."""

    def on_rank() -> tuple[list[Tensor], int]:
        alone, _ = dist.new_subgroups(group_size=1)
        model = DDP(net())
        state = hooks.PostLocalSGDState(None, alone, start_localSGD_iter=2)
        model.register_comm_hook(state, hooks.post_localSGD_hook)
        averager = hooks.PeriodicModelAverager(period=3, warmup_steps=2)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hooks.PostLocalSGDOptimizer(inner, averager)
        snapshots = []
        for step in range(8):
            train(model, optimizer, range(step, step + 1))
            snapshots.append(flat(model))
        saved = optimizer.state_dict()
        averager.step = 0
        optimizer.load_state_dict(saved)
        return snapshots, averager.step

    (first, step), (second, _) = run_ranks(2, on_rank)
    same = [torch.equal(a, b) for a, b in zip(first, second, strict=True)]
    # Step 2 is the first local one, and a meeting; the next are in steps 5 and 8.
    assert same == [True, True, True, False, False, True, False, False]
    assert step == 8


def test_state_without_a_step_warns() -> None:
    def on_rank() -> int:
        inner = torch.optim.SGD(net().parameters(), lr=0.1)
        averager = hooks.PeriodicModelAverager(period=3)
        optimizer = hooks.PostLocalSGDOptimizer(inner, averager)
        averager.step = 7
        with pytest.warns(UserWarning, match="does not contain a step counter for an averager"):
            optimizer.load_state_dict(inner.state_dict())
        return averager.step

    assert run_ranks(1, on_rank) == [0]


class TestArguments:
    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"period": 0}, "period is an int"),
            ({"period": 2, "outer_lr": 0.0}, "outer_lr is above 0"),
            ({"period": 2, "outer_momentum": 1.0}, "outer_momentum at least 0"),
        ],
    )
    def test_diloco(self, options: dict[str, Any], text: str) -> None:
        def on_rank() -> None:
            inner = torch.optim.SGD(net().parameters(), lr=0.1)
            with pytest.raises(ConfigurationError, match=text):
                hooks.DiLoCoOptimizer(inner, **options)

        run_ranks(1, on_rank)

    def test_diloco_state_of_another_optimizer(self) -> None:
        def on_rank() -> None:
            inner = torch.optim.SGD(net().parameters(), lr=0.1)
            optimizer = hooks.DiLoCoOptimizer(inner, period=2)
            with pytest.raises(ConfigurationError, match="no 'diloco' in what was saved"):
                optimizer.load_state_dict(inner.state_dict())

        run_ranks(1, on_rank)

    def test_averagers(self) -> None:
        def on_rank() -> None:
            with pytest.raises(ValueError, match="``period`` must be a positive value"):
                hooks.PeriodicModelAverager(period=0)
            with pytest.raises(ValueError, match="warmup_steps`` must be a non-negative number"):
                hooks.PeriodicModelAverager(period=2, warmup_steps=-1)
            with pytest.warns(UserWarning, match="When period is 1, no need"):
                hooks.PeriodicModelAverager(period=1)
            with pytest.raises(ValueError, match="must not be empty"):
                hooks.HierarchicalModelAverager({})
            with pytest.raises(ValueError, match="must be a positive value"):
                hooks.HierarchicalModelAverager(OrderedDict([(2, 1), (0, 2)]))
            with pytest.raises(ValueError, match="``period_group_size_dict`` 1 must be equal"):
                hooks.HierarchicalModelAverager(OrderedDict([(2, 1)]))
            with pytest.raises(NotImplementedError, match="of type <class 'str'>"):
                hooks.PeriodicModelAverager(period=2).average_parameters(["weights"])  # type: ignore[list-item]

        run_ranks(2, on_rank)

    def test_no_subgroup_and_no_torchrun(self) -> None:
        def on_rank() -> None:
            model = DDP(net())
            state = hooks.PostLocalSGDState(None, None, start_localSGD_iter=0)
            model.register_comm_hook(state, hooks.post_localSGD_hook)
            model(batch(0, 0)).square().mean().backward()

        with pytest.raises(RanksFailedError, match="LOCAL_WORLD_SIZE does not say"):
            run_ranks(2, on_rank, env={"LOCAL_WORLD_SIZE": None})
        run_ranks(2, on_rank)
