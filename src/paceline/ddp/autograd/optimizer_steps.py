"""Tells wrappers when an optimizer has stepped their parameters, and a recorder when it begins.

One hook for all optimizers of the process (``torch.optim``'s own interface for that), set with the
first wrapper; a second one, before steps, with the first recorder. Each costs a look-up per
``optimizer.step()``; nothing is attached to optimizers. They stay: wrappers go when the collector
takes them, which may be while torch walks through its hooks.

Why not ``parameter._version`` alone: fused optimizers do not raise it, a weight that is exchanged
for its moving average and back does, and with a sharded optimizer it differs between ranks. A step
that torch.compile has taken in is seen by its version only (:mod:`paceline.ddp.agree.drift`).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


class Observer(Protocol):
    """Is told of steps of optimizers."""

    parameters: Sequence[torch.Tensor]

    def on_optimizer_step(self) -> None:
        """An optimizer that holds some of these parameters has stepped."""


class BeginObserver(Observer, Protocol):
    """Is told when one begins, too."""

    def on_optimizer_begin(self) -> None:
        """An optimizer that holds some of these parameters begins to step."""


class _Known(NamedTuple):
    """What was found out about an optimizer: whom to tell, and while what it holds."""

    optimizer: weakref.ref[torch.optim.Optimizer]
    groups: int
    generation: int
    observers: tuple[weakref.ref[Observer], ...]


class _Registry:
    """All observers of this process."""

    def __init__(self) -> None:
        self._observers: dict[int, weakref.ref[Observer]] = {}
        self._known: dict[int, _Known] = {}
        self._generation = 0
        self._is_hooked = False
        self._is_begin_hooked = False

    def add(self, observer: Observer) -> None:
        key = id(observer)
        self._observers[key] = weakref.ref(observer, lambda _: self._remove(key))
        self._generation += 1
        if not self._is_hooked:
            self._is_hooked = True
            register_optimizer_step_post_hook(_on_step)

    def add_for_begins(self, observer: BeginObserver) -> None:
        self.add(observer)
        if not self._is_begin_hooked:
            self._is_begin_hooked = True
            register_optimizer_step_pre_hook(_on_begin)

    def _remove(self, key: int) -> None:
        self._observers.pop(key, None)
        self._generation += 1

    @property
    def is_watched(self) -> bool:
        """Whether there is anybody to tell."""
        return bool(self._observers)

    def told_by(self, optimizer: torch.optim.Optimizer) -> _Known:
        known = self._known.get(id(optimizer))
        if (
            known is None
            or known.generation != self._generation
            or known.groups != len(optimizer.param_groups)
            or known.optimizer() is not optimizer
        ):
            known = self._known[id(optimizer)] = self._look(optimizer)
        return known

    def _look(self, optimizer: torch.optim.Optimizer) -> _Known:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        observers = [
            reference
            for reference in list(self._observers.values())  # the collector may come by
            if (alive := reference()) and any(id(p) in held for p in alive.parameters)
        ]
        key = id(optimizer)
        reference = weakref.ref(optimizer, lambda _: self._known.pop(key, None))
        groups = len(optimizer.param_groups)
        return _Known(reference, groups, self._generation, tuple(observers))


_registry = _Registry()


def _on_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    if not _registry.is_watched:
        return
    for reference in _registry.told_by(optimizer).observers:
        observer = reference()
        if observer is not None:
            observer.on_optimizer_step()


def _on_begin(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    if torch.compiler.is_compiling() or not _registry.is_watched:
        return
    for reference in _registry.told_by(optimizer).observers:
        tell = getattr(reference(), "on_optimizer_begin", None)
        if tell is not None:
            tell()


def observe_updates(observer: Observer) -> None:
    """Tell ``observer``, as long as it lives, when its parameters have been stepped."""
    _registry.add(observer)


def observe_optimizers(observer: BeginObserver) -> None:
    """Tell ``observer``, as long as it lives, when steps of its parameters begin and end."""
    _registry.add_for_begins(observer)
