"""Wrappers inside of a wrapper's module: what is said to the outer one holds for them, too.

The outer wrapper leaves their parameters to them (parameters.py), so without this ``no_sync`` and
``weighted`` would hold for a part of the model only. Called by the wrapper.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from paceline.ddp.reduce.reducer import Reducer
from paceline.errors import ConfigurationError
from paceline.torch_private.modules import TorchDDP

if TYPE_CHECKING:
    from paceline.ddp.wrapper import DistributedDataParallel


def find_wrappers(module: torch.nn.Module) -> list[TorchDDP]:
    """Return the wrappers in a module, torch's and ours."""
    return [each for each in module.modules() if isinstance(each, TorchDDP)]


@contextlib.contextmanager
def without_sync(wrappers: Sequence[TorchDDP]) -> Iterator[None]:
    """Let backward passes of these wrappers stay local."""
    before = [wrapper.require_backward_grad_sync for wrapper in wrappers]
    try:
        for wrapper in wrappers:
            wrapper.require_backward_grad_sync = False
        yield
    finally:
        for wrapper, synced in zip(wrappers, before, strict=True):
            wrapper.require_backward_grad_sync = synced


@contextlib.contextmanager
def with_weight(reducers: Sequence[Reducer], weight: float) -> Iterator[None]:
    """Let steps of these reducers count with a weight."""
    with contextlib.ExitStack() as stack:
        for reducer in reducers:
            stack.enter_context(reducer.weighted(weight))
        yield


def weighted_reducers(ddp: DistributedDataParallel, ours: type[TorchDDP]) -> list[Reducer]:
    """Return the reducers that ``ddp.weighted()`` concerns: those of wrappers inside, too.

    Raises:
        ConfigurationError: If gradients would be averaged without weights, by a wrapper that is
            none of ``ours`` or because they are delayed.
    """
    if ddp._delayed is not None:
        raise _weight_error("delayed parameters")
    for wrapper in ddp._inner:
        if not isinstance(wrapper, ours):
            raise _weight_error(f"a wrapper of {type(wrapper).__module__}")
    reducers: list[Any] = [wrapper.reducer for wrapper in (*ddp._inner, ddp)]
    found: list[Reducer] = [reducer for reducer in reducers if isinstance(reducer, Reducer)]
    return found or [ddp._require_reducer("weighted()")]


def _weight_error(what: str) -> ConfigurationError:
    """Return the error for gradients that weighted() would not reach."""
    return ConfigurationError(
        f"weighted(): this wrapper has {what} inside, which would be averaged without weights. "
        "Leave out delay_all_reduce_named_params, or wrap the whole model once."
    )
