"""The inbox and its hooks: the one in C and the one in Python are the same to their listener."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from paceline import DistributedDataParallel as DDP
from paceline.ddp.autograd import hooks as taps
from paceline.ddp.autograd.hooks import Inbox, PythonInbox, make_inbox
from paceline.native.extension import native
from paceline.testing import run_ranks
from tests.ddp.compare import batch
from tests.ddp.models import mlp

KINDS: dict[str, Callable[[Callable[[], None], int], Inbox]] = {"python": PythonInbox}
if native is not None:
    KINDS["native"] = native.Inbox

LIMIT = 1000
each_kind = pytest.mark.parametrize("make", list(KINDS.values()), ids=list(KINDS))


class Listener:
    """Takes what it is told of."""

    def __init__(self) -> None:
        self.taken: list[list[int]] = []
        self.inbox = make_inbox(self)

    def on_gradients(self) -> None:
        self.taken.append(self.inbox.take()[0])

    def on_output(self, leads_to_parameters: bool) -> None:
        """Nobody calls."""


@each_kind
def test_tells_when_as_many_are_there_as_are_due(make: Callable[..., Inbox]) -> None:
    told: list[list[int]] = []
    inbox = make(lambda: told.append(inbox.take()[0]), LIMIT)
    hooks = [inbox.tap(index, 0) for index in range(5)]
    hooks[3]()
    assert told == [[3]]
    inbox.due = 3
    hooks[0]("whatever", "autograd brings")
    hooks[4]()
    assert (len(inbox), inbox.first(), told) == (2, 0, [[3]])
    assert hooks[2]() is None
    assert told == [[3], [0, 4, 2]]
    assert len(inbox) == 0


@each_kind
def test_large_ones_wait_until_they_are_many_bytes(make: Callable[..., Inbox]) -> None:
    told: list[list[int]] = []
    inbox = make(lambda: told.append(inbox.take()[0]), LIMIT)
    inbox.due = 100
    inbox.tap(7, 0)()
    inbox.tap(1, LIMIT - 1)()
    assert not told
    inbox.tap(2, 1)()
    assert told == [[7, 1, 2]]
    assert inbox.due == 1
    inbox.due = 100
    inbox.tap(3, LIMIT - 1)()
    inbox.clear()
    inbox.tap(4, LIMIT - 1)()
    assert len(told) == 1, "what was taken or forgotten does not count again"
    inbox.tap(5, LIMIT)()
    assert told[1:] == [[4, 5]]


@each_kind
def test_takes_more_than_it_had_room_for_in_order(make: Callable[..., Inbox]) -> None:
    inbox = make(lambda: None, LIMIT)
    inbox.due = 1 << 30
    for index in range(1000):
        inbox.tap(index, 0)()
    assert inbox.take() == (list(range(1000)), list(range(1000)))
    inbox.tap(1, 0)()
    inbox.clear()
    assert inbox.take() == ([], [])
    with pytest.raises(IndexError):
        inbox.first()


@each_kind
def test_an_error_of_the_listener_reaches_the_backward(make: Callable[..., Inbox]) -> None:
    def fail() -> None:
        raise RuntimeError("not this one")

    inbox = make(fail, LIMIT)
    layer = nn.Linear(2, 2)
    held = taps.GradientTaps([layer.weight], inbox, set())
    with pytest.raises(RuntimeError, match="not this one"):
        layer(torch.ones(1, 2)).sum().backward()
    held.remove()
    layer(torch.ones(1, 2)).sum().backward()


def test_a_listener_is_freed_though_its_hooks_stay() -> None:
    layer = nn.Linear(2, 2)
    listener = Listener()
    held = taps.GradientTaps(list(layer.parameters()), listener.inbox, set())
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
        taps.native = None
        ddp = DDP(mlp(4))
        assert isinstance(ddp.reducer._inbox, PythonInbox)
        return all(map(torch.equal, gradients_of(ddp), with_it))

    assert run_ranks(2, on_rank) == [True, True]
