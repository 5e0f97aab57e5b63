"""Optimizers in a state: which can be kept, and when one has begun to change parameters.

Used by :mod:`paceline.elastic.state`.

[Note: a step that has begun]
From its first change of a parameter until the commit, a step can be neither undone nor done again.
An optimizer does not say when that is, so a step counts as begun when ``step()`` is called. With a
closure the first thing that an optimizer does is to call it, and the backward in there is where
ranks wait for each other: then the step has begun when the first call has returned.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

from torch.optim import Optimizer

from paceline.elastic.transfer import check_travels
from paceline.errors import ConfigurationError

_IN_PARTS = (
    "{name}={kind} cannot be kept: each rank has a part of its state, and the part of a rank that "
    "dies is lost. Take {inner} without it"
)


def check_optimizer(name: str, optimizer: Optimizer) -> None:
    """Refuse an optimizer whose state a rank that joins could not get.

    Raises:
        ConfigurationError: It is cut into parts, or holds what cannot be sent.
    """
    kind = type(optimizer).__name__
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    zero = getattr(module, "ZeroRedundancyOptimizer", ())
    for each in _nested(optimizer):
        if isinstance(each, zero):
            inner = type(each.optim).__name__
            raise ConfigurationError(_IN_PARTS.format(name=name, kind=kind, inner=inner))
    try:
        state = optimizer.state_dict()
    except Exception as error:
        raise ConfigurationError(
            f"{name}={kind} cannot be kept: its state_dict() does not work: {error}"
        ) from error
    check_travels(f"{name}={kind}", state)


class BegunSteps:
    """Which optimizers have begun a step since the last commit: [Note: a step that has begun].

    Args:
        optimizers: Those of a state.

    Attributes:
        begun: Their numbers.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._is_checked = False
        self.begun: set[int] = set()
        self._handles = [
            _innermost(each).register_step_pre_hook(partial(self._on_step, number))
            for number, each in enumerate(optimizers)
        ]

    def commit(self) -> None:
        """The steps are complete.

        Raises:
            ConfigurationError: After the first: what an optimizer remembers could not be sent.
        """
        if self.begun and not self._is_checked:
            self._is_checked = True
            check_travels("what an optimizer remembers", [o.state_dict() for o in self._optimizers])
        self.begun.clear()

    def give_up(self) -> None:
        """Drop the gradients. A step that its optimizer has undone has not begun."""
        for number, optimizer in enumerate(self._optimizers):
            optimizer.zero_grad(set_to_none=True)
            if getattr(optimizer, "was_undone", False):
                optimizer.was_undone = False  # type: ignore[attr-defined]
                self.begun.discard(number)

    def close(self) -> None:
        """Let go of the optimizers."""
        for handle in self._handles:
            handle.remove()

    def _on_step(self, number: int, _: Any, args: Any, kwargs: Any) -> Any:
        closure = kwargs.get("closure")
        if closure is None and len(args) > 1:  # the optimizer is the first
            closure = args[1]
        if not callable(closure):
            self.begun.add(number)
            return None

        @functools.wraps(closure)
        def marking() -> Any:
            result = closure()
            self.begun.add(number)
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": marking}
        return (args[0], marking, *args[2:]), kwargs


def _innermost(optimizer: Optimizer) -> Optimizer:
    """The optimizer that steps, inside of those that let ranks meet."""
    *_, innermost = _nested(optimizer)
    return cast(Optimizer, innermost)


def _nested(optimizer: Any) -> Iterator[Any]:
    while isinstance(optimizer, Optimizer):
        yield optimizer
        optimizer = getattr(optimizer, "optim", None)
