"""Buffers: broadcast before a forward, or given to a hook before or after it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel.distributed import _BufferCommHookLocation

from paceline import DistributedDataParallel as DDP
from paceline.testing import run_ranks
from tests.ddp.compare import assert_close, assert_identical, batch, gradients, pair, step_both
from tests.ddp.models import Normed, mlp, seeded

PRE = _BufferCommHookLocation.PRE_FORWARD
POST = _BufferCommHookLocation.POST_FORWARD


class Counter(nn.Module):
    """Adds its rank + 1 to a buffer in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.count += dist.get_rank() + 1
        self.steps += 1
        return self.linear(x)


def run(ddp: nn.Module, steps: int) -> list[float]:
    seen = []
    for step in range(steps):
        ddp(batch(step)).square().mean().backward()
        seen.append(ddp.module.count.item())
    return seen


def test_rank_0_is_the_source_before_every_forward() -> None:
    def on_rank() -> list[float]:
        ours, theirs = pair(seeded(Counter))
        seen = run(ours, 3)
        assert seen == run(theirs, 3)
        assert ours.will_sync_module_buffers()
        return seen

    assert run_ranks(2, on_rank) == [[1, 2, 3], [2, 3, 4]]


@pytest.mark.parametrize("name", ["forward_sync_buffers", "broadcast_buffers"])
def test_can_be_turned_off(name: str) -> None:
    def on_rank() -> tuple[list[float], bool]:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            ours = DDP(seeded(Counter), **{name: False})
        assert [w.category for w in seen] == ([FutureWarning] if "broadcast" in name else [])
        assert not ours.will_sync_module_buffers()
        return run(ours, 3)

    assert run_ranks(2, on_rank) == [[1, 2, 3], [2, 4, 6]]


def test_deprecated_name_also_governs_construction() -> None:
    """broadcast_buffers=False leaves buffers alone at construction; the new name does not."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.register_buffer("mine", torch.tensor([float(dist.get_rank())]))

    def on_rank() -> list[float]:
        warnings.filterwarnings("ignore", category=FutureWarning)
        values = []
        for options in ({"broadcast_buffers": False}, {"forward_sync_buffers": False}):
            ours, theirs = pair(Own(), **options)
            assert ours.module.mine.equal(theirs.module.mine)
            values.append(ours.module.mine.item())
        return values

    assert run_ranks(2, on_rank) == [[0, 0], [1, 0]]


def test_batch_norm_equals_torch() -> None:
    def on_rank() -> None:
        ours, theirs = pair(seeded(Normed))
        for step in range(4):
            step_both(ours, theirs, lambda m, s=step: m(batch(s)).square().mean())
            assert_identical(dict(ours.module.state_dict()), dict(theirs.module.state_dict()))

    run_ranks(2, on_rank)


def test_two_forwards_before_one_backward() -> None:
    def on_rank() -> None:
        ours, theirs = pair(seeded(Normed))
        for step in range(3):

            def loss(model: nn.Module, step: int = step) -> Tensor:
                first, second = model(batch(2 * step)), model(batch(2 * step + 1))
                return (first * second).mean()

            step_both(ours, theirs, loss)
        assert_identical(dict(ours.module.state_dict()), dict(theirs.module.state_dict()))

    run_ranks(2, on_rank)


def mean_hook(state: Any, buffers: dict[str, Tensor]) -> list[torch.futures.Future[Any]]:
    """Average floating-point buffers over the ranks, in the background."""
    state.append(sorted(buffers))
    futures = []
    for buffer in buffers.values():
        if buffer.is_floating_point():
            buffer.div_(dist.get_world_size())
            futures.append(dist.all_reduce(buffer, async_op=True).get_future())
    return futures


def waiting_mean_hook(state: Any, buffers: dict[str, Tensor]) -> None:
    """The same before a forward, which is about to change the buffers."""
    torch.futures.wait_all(mean_hook(state, buffers))


@pytest.mark.parametrize("location", [PRE, POST])
def test_hook(location: _BufferCommHookLocation) -> None:
    def on_rank() -> list[float]:
        ours, theirs = pair(seeded(Counter))
        calls: tuple[list[Any], list[Any]] = ([], [])
        for ddp, state in zip((ours, theirs), calls, strict=True):
            hook = waiting_mean_hook if location == PRE else mean_hook
            ddp._register_buffer_comm_hook(state, hook, location)
        seen, expected = run(ours, 3), run(theirs, 3)
        assert seen == expected
        assert calls[0] == [["count", "steps"]] * 3 == calls[1]
        return seen

    expected = {PRE: [[1, 2.5, 4], [2, 3.5, 5]], POST: [[1.5, 3, 4.5], [1.5, 3, 4.5]]}
    assert run_ranks(2, on_rank) == expected[location]


def test_hook_is_after_forward_by_default() -> None:
    def on_rank() -> list[float]:
        ddp = DDP(seeded(Counter))
        ddp._register_buffer_comm_hook([], mean_hook)
        return run(ddp, 2)

    assert run_ranks(2, on_rank) == [[1.5, 3]] * 2


def test_hook_that_returns_nothing_and_calls_the_default() -> None:
    def on_rank() -> list[float]:
        ddp = DDP(seeded(Counter))

        def hook(state: Any, buffers: dict[str, Tensor]) -> None:
            state._default_broadcast_coalesced()

        ddp._register_buffer_comm_hook(ddp, hook, PRE)
        return run(ddp, 3)

    assert run_ranks(2, on_rank) == [[1, 2, 3], [2, 3, 4]]


def test_evaluation_does_not_break_the_schedule() -> None:
    """A forward under no_grad on all ranks: buffers are synchronised as in torch."""

    def on_rank() -> None:
        ours, theirs = pair(seeded(Counter))
        for step in range(3):
            for ddp in (ours, theirs):
                with torch.no_grad():
                    ddp(batch(50))
                ddp(batch(step)).mean().backward()
            assert ours.module.count.equal(theirs.module.count)

    run_ranks(2, on_rank)


def test_no_buffers_no_broadcast() -> None:
    def on_rank() -> None:
        ddp = DDP(mlp(4))
        assert not ddp.will_sync_module_buffers()
        if dist.get_rank() == 0:  # alone: a broadcast would hang
            with torch.no_grad():
                ddp(batch(0))
        ddp(batch(1)).mean().backward()
        assert_close(gradients(ddp), gradients(ddp))

    run_ranks(2, on_rank)


def test_a_buffer_that_is_replaced_is_found() -> None:
    class Replacing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.count = self.count + dist.get_rank() + 1
            return self.linear(x)

    def on_rank() -> list[float]:
        ours, theirs = pair(seeded(Replacing))
        seen = run(ours, 3)
        assert seen == run(theirs, 3)
        return seen

    assert run_ranks(2, on_rank) == [[1, 2, 3], [2, 3, 4]]
