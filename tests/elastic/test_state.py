"""What a commit keeps, what is put back, what is refused; and a state as tensors and JSON."""

from __future__ import annotations

import json
import logging
import os
import random
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

from paceline import DistributedDataParallel as DDP
from paceline.elastic import State, run, session
from paceline.elastic.commit.random_state import read_generators, write_generators
from paceline.elastic.transfer import describe, make_tensors, rebuild
from paceline.errors import ConfigurationError, StateTransferError
from paceline.hooks.interface import done
from paceline.testing import run_ranks


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer, State]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Dropout())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return model, optimizer, State(model=model, optimizer=optimizer, scheduler=scheduler, step=0)


def draw() -> tuple[float, float]:
    return float(torch.rand(())), random.random()


def test_what_a_forward_changes_is_put_back() -> None:
    model, _, state = make()
    state.step = 3
    state.commit()
    buffers = [b.clone() for b in model.buffers()]
    drawn = draw()
    state.put_back()
    state.commit()
    model(torch.randn(4, 3)).sum().backward()
    state.step = 9
    state.put_back()
    assert draw() == drawn
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    assert state.step == 3
    assert all(p.grad is None for p in model.parameters())
    state.close()


def test_a_learning_rate_that_was_changed_is_put_back() -> None:
    _, optimizer, state = make()
    optimizer.param_groups[0]["lr"] = 7.0
    state.put_back()
    assert optimizer.param_groups[0]["lr"] == 0.1
    state.close()


def test_a_learning_rate_in_a_tensor_is_put_back() -> None:
    """Schedulers change it in place; whoever holds it (a captured graph) still does."""
    model = torch.nn.Linear(2, 1)
    rate = torch.tensor(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    state = State(model=model, optimizer=optimizer, scheduler=scheduler)
    held = optimizer.param_groups[0]["lr"]
    optimizer.step()
    state.commit()
    for _ in range(2):  # what is kept must not be what is in use
        scheduler.step()
        assert float(held) == 0.25
        state.put_back()
        assert optimizer.param_groups[0]["lr"] is held
        assert float(held) == 0.5
        assert scheduler.get_last_lr() == [0.5]
    state.close()


class Replacing(torch.nn.Module):
    """Its forward puts another tensor in the place of a buffer, as DDP allows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.mean: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.5 * self.mean + x.mean(0)
        return x - self.mean


def test_a_buffer_that_a_forward_replaces_is_put_back() -> None:
    model = Replacing()
    state = State(model=model, step=0)
    model(torch.ones(3, 2))
    state.commit()
    kept = model.mean
    for _ in range(2):
        model(torch.ones(3, 2))
        model(torch.ones(3, 2))
        assert model.mean.tolist() == [1.75, 1.75]
        state.put_back()
        assert model.mean is kept
        assert kept.tolist() == [1.0, 1.0]
    state.close()


def test_a_generator_of_the_users_own_is_put_back() -> None:
    generator = torch.Generator().manual_seed(3)
    state = State(generator=generator)
    torch.rand(5, generator=generator)
    state.commit()
    drawn = torch.rand(5, generator=generator)
    state.put_back()
    assert torch.equal(torch.rand(5, generator=generator), drawn)
    assert state.generator is generator


def test_it_is_clean_until_an_optimizer_steps() -> None:
    model, optimizer, state = make()
    model(torch.randn(4, 3)).sum().backward()
    assert state.is_clean
    optimizer.step()
    assert not state.is_clean
    state.step = 5
    state.put_back()
    assert state.step == 5  # there is no way back behind an optimizer's step
    state.commit()
    assert state.is_clean
    state.close()


def test_a_scaler_forgets_a_step_that_failed() -> None:
    model, optimizer, state = make()
    state.close()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    state = State(model=model, optimizer=optimizer, scaler=scaler)
    for _ in range(2):  # the second time, unscale_ would refuse
        scaler.scale(model(torch.randn(4, 3)).sum()).backward()
        scaler.unscale_(optimizer)
        state.put_back()
    scaler.scale(model(torch.randn(4, 3)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 16.0
    state.commit()
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0})
    state.put_back()
    assert scaler.get_scale() == 16.0
    state.close()


def test_what_a_wrapper_counts_is_put_back() -> None:
    def on_rank() -> None:
        ddp = DDP(torch.nn.Linear(3, 1), nonfinite="skip")
        state = State(model=ddp, optimizer=torch.optim.SGD(ddp.parameters(), lr=0.1))

        def step(value: float) -> None:
            with ddp.weighted(64):
                ddp(torch.full((2, 3), value)).sum().backward()

        step(1.0)
        step(float("nan"))
        state.commit()
        assert ddp.reducer is not None
        unit = ddp.reducer.runner.weighted_mean.unit
        assert (ddp.skipped_steps, unit) == (1, 64.0)
        step(float("nan"))
        with ddp.weighted(1000):
            ddp(torch.ones(2, 3)).sum().backward()
        assert ddp.reducer.runner.weighted_mean.unit == 1024.0
        state.put_back()
        assert (ddp.skipped_steps, ddp.reducer.runner.weighted_mean.unit) == (1, 64.0)
        ddp._update_process_group(dist.group.WORLD)
        assert ddp.reducer.runner.weighted_mean.unit == 64.0  # as before, not 1

    run_ranks(1, on_rank)


def test_local_gradients_after_a_backward_that_raised() -> None:
    """What had arrived of it is not counted among gradients of the next steps."""

    def on_rank() -> None:
        layers = [torch.nn.Linear(4, 4) for _ in range(8)]
        ddp = DDP(torch.nn.Sequential(*layers))
        x = torch.randn(2, 4)
        for _ in range(2):
            ddp(x).sum().backward()

        def fail(_: torch.Tensor) -> None:
            raise ConnectionError("a rank died")

        handle = layers[3].weight.register_hook(fail)
        with pytest.raises(ConnectionError):
            ddp(x).sum().backward()
        handle.remove()
        ddp._update_process_group(dist.group.WORLD)
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(x).sum().backward()
        ddp(x).sum().backward()
        expected = torch.nn.Sequential(*layers)
        found = [p.grad.clone() for p in expected.parameters()]
        expected.zero_grad()
        (2 * expected(x).sum()).backward()
        for mine, parameter in zip(found, expected.parameters(), strict=True):
            torch.testing.assert_close(mine, parameter.grad)

    run_ranks(1, on_rank)


def test_elsewhere_the_function_is_called_and_a_line_says_so() -> None:
    def on_rank() -> tuple[list[int], list[str]]:
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("paceline.elastic").addHandler(handler)
        os.environ["PACELINE_HOST_ID"] = f"host {os.environ['RANK']}"
        state = State(step=3)
        called = [run(lambda state, more: state.step + more)(state, 4)]
        return called, lines

    (called, lines), (also_called, nothing) = run_ranks(2, on_rank)
    assert called == also_called == [7]
    assert len(lines) == 1
    assert "on several hosts and were not started by `paceline run --elastic`" in lines[0]
    assert not nothing
    [(_, lines)] = run_ranks(1, on_rank)
    assert not lines


def test_a_hook_that_cannot_be_kept_is_named() -> None:
    class Memory:
        def __init__(self) -> None:
            self.errors: dict[int, torch.Tensor] = {}

    def on_rank() -> list[str]:
        ddp = DDP(torch.nn.Linear(3, 1))
        ddp.register_comm_hook(Memory(), lambda memory, bucket: done(bucket.buffer()))
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("paceline.elastic").addHandler(handler)
        state = State(model=ddp)
        state.commit()
        return lines

    [lines] = run_ranks(1, on_rank)
    assert len(lines) == 1
    assert "(Memory) has no state_dict" in lines[0]


@pytest.mark.parametrize("draw", [numpy.random.random, numpy.random.normal])
def test_numpy_numbers_are_put_back(draw: Any) -> None:
    """Also the second normal number, which numpy holds back without a trace in its words."""
    numpy.random.seed(1)
    for _ in range(5):
        states = read_generators()
        expected = [draw() for _ in range(3)]
        write_generators(states)
        assert [draw() for _ in range(3)] == expected
        write_generators(states)
        draw()


def test_what_cannot_be_kept_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="data=list cannot be kept"):
        State(data=[1, 2])
    with pytest.raises(ConfigurationError, match="cannot have a member 'commit'"):
        State(commit=1)


def test_what_could_not_be_made_again_is_refused() -> None:
    def on_rank() -> list[str]:
        mine = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
        part = State(model=DDP(torch.nn.Linear(2, 1), process_group=mine))
        stepping = DDP(torch.nn.Linear(2, 1))
        stepping.module.weight._in_backward_optimizers = []  # as torch marks them
        texts = []
        for state in (part, State(model=stepping)):
            with pytest.raises(ConfigurationError) as caught:
                session._check(state)
            texts.append(str(caught.value))
        return texts

    for texts in run_ranks(2, on_rank):
        assert "over a group that has not all ranks" in texts[0]
        assert "step in the backward" in texts[1]


class Unsendable:
    def state_dict(self) -> dict[str, Any]:
        return {"seen": {1, 2}}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_what_could_not_be_sent_after_a_death_is_refused_at_once() -> None:
    with pytest.raises(ConfigurationError, match="part=Unsendable cannot be kept: a set cannot be"):
        State(part=Unsendable())


def test_states_of_schedulers_can_be_sent() -> None:
    """With the types that they work with: milestones are counted, and asked for their elements."""
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1.0)
    later = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])
    found: list[torch.Tensor] = []
    description = json.loads(json.dumps(describe(later.state_dict(), found)))
    later.load_state_dict(rebuild(description, iter(found)))
    assert sorted(later.milestones.elements()) == [2, 2, 5]
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    plateau.step(numpy.float32(0.5))  # type: ignore[arg-type]
    state = rebuild(describe({**plateau.state_dict(), "best": numpy.float32(0.5)}, []), iter(()))
    assert type(state["best"]) is float


TREES: list[Any] = [
    {"a": [1, 2.5, None, True, "x"], 3: (torch.arange(4), {"b": torch.ones(2, 0)})},
    [float("inf"), -0.0, torch.tensor(3, dtype=torch.bfloat16)],
    {},
    {"sparse": torch.ones(3).to_sparse()},
    # Two entries of one row, which must not be added up on the way.
    [torch.sparse_coo_tensor([[1, 1]], torch.ones(2, 2), (4, 2), check_invariants=True)],
]


@pytest.mark.parametrize("tree", TREES)
def test_a_tree_survives(tree: Any) -> None:
    found: list[torch.Tensor] = []
    description = describe(tree, found)
    made = make_tensors(description)
    assert [(t.shape, t.dtype) for t in made] == [(t.shape, t.dtype) for t in found]
    assert repr(rebuild(description, iter(found))) == repr(tree)


def test_what_cannot_travel_is_refused() -> None:
    with pytest.raises(StateTransferError, match="a set cannot be sent"):
        describe({"a": {1}}, [])
    with pytest.raises(StateTransferError, match="no dtype 'load'"):
        make_tensors({"tensor": [[2], "load", "cpu"]})
