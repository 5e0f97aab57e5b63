"""Optimizers tell those whose parameters they hold, and nothing is left when nobody listens."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.optimizer import _global_optimizer_post_hooks as hooks
from torch.optim.optimizer import register_optimizer_step_post_hook

from paceline.ddp.autograd.optimizer_steps import observe_updates

# An optimizer's first step imports torch._dynamo, which may set TORCHINDUCTOR_CACHE_DIR.
pytestmark = pytest.mark.may_leave("environ")


class Counter:
    """Counts what it is told."""

    def __init__(self, *parameters: nn.Parameter) -> None:
        self.parameters = parameters
        self.told = 0
        observe_updates(self)

    def on_optimizer_step(self) -> None:
        self.told += 1


def parameter() -> nn.Parameter:
    value = nn.Parameter(torch.ones(2))
    value.grad = torch.ones(2)
    return value


def test_who_holds_a_parameter_is_told() -> None:
    a, b, c = parameter(), parameter(), parameter()
    first, second = Counter(a, b), Counter(c)
    of_a, of_both, of_others = SGD([a]), SGD([b, c]), SGD([parameter()])
    for optimizer in (of_a, of_a, of_both, of_others):
        optimizer.step()
    assert (first.told, second.told) == (3, 1)


def test_a_group_that_is_added_later_counts() -> None:
    a, b = parameter(), parameter()
    counter = Counter(b)
    optimizer = SGD([a])
    optimizer.step()
    assert counter.told == 0
    optimizer.add_param_group({"params": [b]})
    optimizer.step()
    assert counter.told == 1


def test_an_observer_that_comes_later_is_told() -> None:
    a = parameter()
    first = Counter(a)
    optimizer = SGD([a])
    optimizer.step()
    second = Counter(a)
    optimizer.step()
    assert (first.told, second.told) == (2, 1)


def test_an_optimizer_in_the_memory_of_another_is_looked_at_anew() -> None:
    a, b = parameter(), parameter()
    counter = Counter(b)
    for _ in range(50):
        SGD([a]).step()
        SGD([b]).step()
    assert counter.told == 50


def test_nothing_is_left() -> None:
    gc.collect()
    before = len(hooks)
    a = parameter()
    counters = [Counter(a), Counter(a)]
    optimizer = SGD([a])
    optimizer.step()
    assert len(hooks) <= before + 1
    copied = copy.deepcopy(optimizer)
    copied.step()
    assert [counter.told for counter in counters] == [1, 1], "a copy holds other parameters"
    del counters
    gc.collect()
    assert len(hooks) <= before + 1, "one hook is enough for all"
    optimizer.step()


class Shortlived:
    """An observer in a cycle: the collector may take it at any moment."""

    def __init__(self) -> None:
        self.parameters = ()
        self.itself = self
        observe_updates(self)

    def on_optimizer_step(self) -> None:
        raise AssertionError("it holds nothing")


class Collecting:
    """One during whose look-up the collector comes by."""

    def __init__(self) -> None:
        observe_updates(self)

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        gc.collect()
        return ()

    def on_optimizer_step(self) -> None:
        raise AssertionError("it holds nothing")


def test_observers_that_are_collected_while_they_are_looked_through() -> None:
    a = parameter()
    counter, collecting = Counter(a), Collecting()
    gc.disable()
    try:
        for _ in range(10):
            Shortlived()
        SGD([a]).step()
    finally:
        gc.enable()
    assert counter.told == 1
    del collecting


def test_the_last_observer_is_collected_while_torch_walks_through_its_hooks() -> None:
    """None of them may be taken away then."""
    gc.collect()
    optimizer = SGD([parameter()])
    collects = register_optimizer_step_post_hook(lambda *_: gc.collect() and None)
    hooks.move_to_end(collects.id, last=False)
    try:
        Shortlived()
        optimizer.step()
    finally:
        collects.remove()
