"""The queue and its hooks: the one in C and the one in Python are the same to their listener."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from paceline import DistributedDataParallel as DDP
from paceline.ddp.autograd import hooks as gradient_hooks
from paceline.ddp.autograd.hooks import PythonReadyQueue, ReadyQueue, make_ready_queue
from paceline.native.extension import native
from paceline.testing import run_ranks
from tests.ddp.compare import batch
from tests.ddp.models import mlp

KINDS: dict[str, Callable[[Callable[[], None], int], ReadyQueue]] = {"python": PythonReadyQueue}
if native is not None:
    KINDS["native"] = native.ReadyQueue

LIMIT = 1000
each_kind = pytest.mark.parametrize("make", list(KINDS.values()), ids=list(KINDS))


class Listener:
    """Takes what it is told of."""

    def __init__(self) -> None:
        self.taken: list[list[int]] = []
        self.queue = make_ready_queue(self)

    def on_gradients(self) -> None:
        self.taken.append(self.queue.take()[0])

    def on_output(self, leads_to_parameters: bool) -> None:
        """Nobody calls."""


@each_kind
def test_tells_when_as_many_are_there_as_are_due(make: Callable[..., ReadyQueue]) -> None:
    told: list[list[int]] = []
    queue = make(lambda: told.append(queue.take()[0]), LIMIT)
    hooks = [queue.make_hook(index, 0) for index in range(5)]
    hooks[3]()
    assert told == [[3]]
    queue.due = 3
    hooks[0]("whatever", "autograd brings")
    hooks[4]()
    assert (len(queue), queue.first(), told) == (2, 0, [[3]])
    assert hooks[2]() is None
    assert told == [[3], [0, 4, 2]]
    assert len(queue) == 0


@each_kind
def test_large_ones_wait_until_they_are_many_bytes(make: Callable[..., ReadyQueue]) -> None:
    told: list[list[int]] = []
    queue = make(lambda: told.append(queue.take()[0]), LIMIT)
    queue.due = 100
    queue.make_hook(7, 0)()
    queue.make_hook(1, LIMIT - 1)()
    assert not told
    queue.make_hook(2, 1)()
    assert told == [[7, 1, 2]]
    assert queue.due == 1
    queue.due = 100
    queue.make_hook(3, LIMIT - 1)()
    queue.clear()
    queue.make_hook(4, LIMIT - 1)()
    assert len(told) == 1, "what was taken or forgotten does not count again"
    queue.make_hook(5, LIMIT)()
    assert told[1:] == [[4, 5]]


@each_kind
def test_takes_more_than_it_had_room_for_in_order(make: Callable[..., ReadyQueue]) -> None:
    queue = make(lambda: None, LIMIT)
    queue.due = 1 << 30
    for index in range(1000):
        queue.make_hook(index, 0)()
    assert queue.take() == (list(range(1000)), list(range(1000)))
    queue.make_hook(1, 0)()
    queue.clear()
    assert queue.take() == ([], [])
    with pytest.raises(IndexError):
        queue.first()


@each_kind
def test_an_error_of_the_listener_reaches_the_backward(make: Callable[..., ReadyQueue]) -> None:
    def fail() -> None:
        raise RuntimeError("not this one")

    queue = make(fail, LIMIT)
    layer = nn.Linear(2, 2)
    held = gradient_hooks.GradientHooks([layer.weight], queue, set())
    with pytest.raises(RuntimeError, match="not this one"):
        layer(torch.ones(1, 2)).sum().backward()
    held.remove()
    layer(torch.ones(1, 2)).sum().backward()


def test_a_listener_is_freed_though_its_hooks_stay() -> None:
    layer = nn.Linear(2, 2)
    listener = Listener()
    held = gradient_hooks.GradientHooks(list(layer.parameters()), listener.queue, set())
    layer(torch.ones(1, 2)).sum().backward()
    assert sorted(map(tuple, listener.taken)) == [(0,), (1,)]
    gone = weakref.ref(listener)
    gc.disable()
    try:
        del listener
        assert gone() is None
    finally:
        gc.enable()
    layer(torch.ones(1, 2)).sum().backward()  # tells nobody
    held.remove()


def test_without_the_native_core_a_step_gives_the_same_bits() -> None:
    def gradients_of(model: nn.Module) -> list[torch.Tensor]:
        for step in range(3):
            model.zero_grad()
            model(batch(step)).square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    def on_rank() -> bool:
        with_it = gradients_of(DDP(mlp(4)))
        gradient_hooks.native = None
        ddp = DDP(mlp(4))
        assert isinstance(ddp.reducer.runner.queue, PythonReadyQueue)
        return all(map(torch.equal, gradients_of(ddp), with_it))

    assert run_ranks(2, on_rank) == [True, True]
