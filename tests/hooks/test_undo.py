"""A hook goes back to its mark: after steps that do not count, it continues with the same bits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline import DistributedDataParallel as DDP
from paceline import hooks
from paceline.hooks.undo import UndoLog
from paceline.testing import run_ranks
from tests.hooks.cases import Bucket
from tests.hooks.test_resume import HOOKS, batch, bits, make, train


@pytest.mark.parametrize(
    "marked_at",
    [0, *(pytest.param(at, marks=pytest.mark.slow) for at in (2, 4))],
)
def test_a_step_that_does_not_count(marked_at: int) -> None:
    """Marked before the first step, and later. Not after the first: buckets are cut anew then,
    and a wrapper that changes its group does so one step later.
    """

    def on_rank() -> list[str]:
        different = []
        for name in HOOKS:
            expected, _, optimizer = make(DDP, name)
            train(expected, optimizer, range(8))
            model, state, optimizer = make(DDP, name)
            train(model, optimizer, range(marked_at))
            state.mark()
            lost_model, lost_optimizer = _copy_of(model, optimizer)
            optimizer.zero_grad()
            model(100 * batch(77)).square().mean().backward()  # it does not count
            state.roll_back()
            model._update_process_group(dist.group.WORLD)  # as a new epoch does
            model.load_state_dict(lost_model)
            optimizer.load_state_dict(lost_optimizer)
            train(model, optimizer, range(marked_at, 8))
            if bits(model) != bits(expected):
                different.append(name)
        return different

    assert run_ranks(2, on_rank, timeout_s=250) == [[]] * 2


def _copy_of(model: Any, optimizer: Any) -> tuple[Any, Any]:
    return copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())


def test_it_matters() -> None:
    """The test above can fail: without going back, the bits are others."""

    def on_rank() -> None:
        for name in ("int8", "powersgd", "topk"):
            expected, _, optimizer = make(DDP, name)
            train(expected, optimizer, range(8))
            model, _, optimizer = make(DDP, name)
            train(model, optimizer, range(4))
            before = _copy_of(model, optimizer)
            model(100 * batch(77)).square().mean().backward()
            model.load_state_dict(before[0])
            optimizer.load_state_dict(before[1])
            train(model, optimizer, range(4, 8))
            assert bits(model) != bits(expected), name

    run_ranks(2, on_rank)


def test_a_mark_copies_nothing_and_a_change_copies_once() -> None:
    log, tensor = UndoLog(), torch.arange(5.0)
    log.before(tensor)
    log.mark()
    tensor += 1
    log.before(tensor)
    tensor += 1
    log.before(tensor)
    tensor += 1
    log.roll_back()
    assert tensor.tolist() == [1, 2, 3, 4, 5]
    log.before(tensor)
    tensor.zero_()
    log.mark()
    log.roll_back()
    assert tensor.tolist() == [0] * 5


def test_what_is_left_out_survives_a_change_of_ranks() -> None:
    """Three ranks become two: what they remember of the mean's slices goes on with their own."""

    def on_rank() -> None:
        state, parameter = hooks.QuantizedState(block=8), torch.zeros(120)
        values = torch.randn(120, generator=torch.Generator().manual_seed(dist.get_rank()))
        _reduce(state, values, parameter)
        kept = {i: e.clone() for i, e in state._mean_errors.items()}
        own = state.memory.flats("error")[0].clone()
        pair = dist.new_group([0, 1])
        if dist.get_rank() == 2:
            return
        assert kept[0].any()
        state.mark()
        state.change_group(pair)
        start = dist.get_rank() * kept[0].numel()
        own[start : start + kept[0].numel()] += 2 * kept[0]
        assert torch.equal(state.memory.flats("error")[0], own)
        assert not state._mean_errors
        state.roll_back()  # the new epoch did not come about
        assert torch.equal(state._mean_errors[0], kept[0])
        state.change_group(pair)
        _reduce(state, values, parameter)

    run_ranks(3, on_rank)


def _reduce(state: Any, values: torch.Tensor, parameter: torch.Tensor) -> None:
    hooks.quantized_hook(state, Bucket(values.clone(), [parameter])).wait()


def test_a_joiner_takes_what_ranks_have_in_common() -> None:
    def on_rank() -> None:
        for name in ("powersgd", "int8", "topk"):
            model, state, optimizer = make(DDP, name)
            train(model, optimizer, range(5))
            _, joiner, _ = make(DDP, name)
            joiner.load_shared_state(state.shared_state())
            assert joiner.step == 5
            assert joiner.state_dict()["extra"].keys() == state.state_dict()["extra"].keys()
            assert not joiner.memory.state_dict()
            state.forget_feedback()
            assert not state.memory.state_dict()
            assert state.step == 5

    run_ranks(2, on_rank)


def test_a_failed_meeting_is_undone() -> None:
    """DiLoCo and local SGD: the local step of a meeting that fails is taken back."""

    def on_rank() -> None:
        for make_optimizer in (_diloco, _post_local):
            parameter = torch.nn.Parameter(torch.ones(4))
            inner = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
            optimizer, fail = make_optimizer(inner)
            optimizer.undoes_failed_steps = True
            for step in range(4):
                parameter.grad = torch.ones(4)
                before = parameter.detach().clone(), inner.state[parameter].copy()
                momentum = {k: v.clone() for k, v in before[1].items() if v is not None}
                if step == 3:
                    fail()
                    with pytest.raises(ConnectionError):
                        optimizer.step()
                    assert optimizer.was_undone
                    assert torch.equal(parameter.detach(), before[0])
                    assert torch.equal(inner.state[parameter]["momentum_buffer"],
                                       momentum["momentum_buffer"])  # fmt: skip
                else:
                    optimizer.step()
                    assert not torch.equal(parameter.detach(), before[0])

    run_ranks(2, on_rank)


def _refuse(*_: Any, **__: Any) -> None:
    raise ConnectionError("a rank died")


def _diloco(inner: torch.optim.Optimizer) -> tuple[Any, Any]:
    optimizer = hooks.DiLoCoOptimizer(inner, period=2)
    return optimizer, lambda: setattr(optimizer, "_meet", _refuse)


def _post_local(inner: torch.optim.Optimizer) -> tuple[Any, Any]:
    averager = hooks.PeriodicModelAverager(3)
    optimizer = hooks.PostLocalSGDOptimizer(inner, averager)
    return optimizer, lambda: setattr(averager, "average_parameters", _refuse)
