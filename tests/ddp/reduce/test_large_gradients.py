"""When the listener is told of gradients: large ones wait for each other, but not for ever."""

from __future__ import annotations

import torch

from paceline.ddp.autograd.hooks import WAITING_BYTES, GradientHooks, make_ready_queue

HALF = WAITING_BYTES // 2 // 4
"""Elements of half of what may wait."""
NEVER = 1 << 30


class Told:
    """A listener that notes what it is told of."""

    def __init__(self, due: int) -> None:
        self.calls: list[list[int]] = []
        self.due = due
        self.queue = make_ready_queue(self)
        self.queue.due = due

    def on_gradients(self) -> None:
        self.calls.append(self.queue.take()[0])
        self.queue.due = self.due

    def on_output(self, leads_to_parameters: bool) -> None:
        raise AssertionError("no output has a hook here")


def parameters(*numels: int) -> list[torch.Tensor]:
    return [torch.ones(numel, requires_grad=True) for numel in numels]


def arrive(*ready: torch.Tensor) -> None:
    """Let gradients arrive, one backward for each."""
    for parameter in ready:
        parameter.sum().backward()


def test_large_gradients_wait_until_they_are_many_bytes() -> None:
    told = Told(due=NEVER)
    a, b, c, d = params = parameters(HALF, HALF, HALF, HALF)
    hooks = GradientHooks(params, told.queue, large={0, 1, 2, 3})
    arrive(a)
    assert told.calls == []
    arrive(b)
    assert told.calls == [[0, 1]]
    arrive(c)
    assert told.calls == [[0, 1]], "what has been taken does not count again"
    arrive(d)
    assert told.calls == [[0, 1], [2, 3]]
    hooks.remove()


def test_one_that_is_larger_than_that_does_not_wait() -> None:
    told = Told(due=NEVER)
    small, huge = params = parameters(10, 2 * HALF)
    hooks = GradientHooks(params, told.queue, large={1})
    arrive(small, huge)
    assert told.calls == [[0, 1]]
    hooks.remove()


def test_small_gradients_do_not_make_large_ones_due() -> None:
    told = Told(due=NEVER)
    large, *small = params = parameters(HALF, *[HALF] * 3)
    hooks = GradientHooks(params, told.queue, large={0})
    arrive(large, *small)
    assert told.calls == []
    hooks.remove()


def test_a_bucket_that_can_be_full_does_not_wait_for_bytes() -> None:
    told = Told(due=2)
    params = parameters(10, HALF)
    hooks = GradientHooks(params, told.queue, large={1})
    arrive(*params)
    assert told.calls == [[0, 1]]
    hooks.remove()


def test_clearing_forgets_the_bytes() -> None:
    told = Told(due=NEVER)
    a, b = params = parameters(HALF, HALF)
    hooks = GradientHooks(params, told.queue, large={0, 1})
    arrive(a)
    told.queue.clear()
    arrive(b)
    assert told.calls == []
    assert told.queue.take()[0] == [1]
    hooks.remove()
